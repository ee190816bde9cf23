//! What the program asks for: that it is saved.

use std::path::PathBuf;

use gpucr_core::image::check_name;
use gpucr_wire::supervisor::{LONGEST_REASON, SupervisorReply, code};

use super::events::EventPipe;
use crate::stores;

/// So many requests are kept, those that are done included; of these the oldest are forgotten.
const MOST: usize = 64;

/// The requests of the program.
pub(super) struct Tickets {
    store: PathBuf,
    last: u64,
    /// The oldest first.
    all: Vec<Ticket>,
    /// What the dump under way says, if it is for one of them.
    dump: Option<Dump>,
    /// Nothing is saved any more.
    is_over: bool,
}

struct Ticket {
    number: u64,
    /// The name of the image; an empty one is made up.
    name: String,
    state: State,
}

#[derive(Clone, PartialEq, Eq)]
enum State {
    Waits,
    /// A dump is under way for it.
    IsServed,
    Done(Result<(), (i32, String)>),
}

struct Dump {
    events: EventPipe,
    /// The program is being stopped, or was: who asks now is not in the image.
    has_stopped: bool,
}

impl Dump {
    fn has_stopped(&mut self) -> bool {
        let stops = |event: &serde_json::Value| event["phase"] == "gate";
        self.has_stopped |= self.events.listen().iter().any(stops);
        self.has_stopped
    }
}

fn refused(code: i32, why: &str) -> SupervisorReply {
    let mut why = why.to_owned();
    let cut = (0..=LONGEST_REASON.min(why.len())).rev().find(|cut| why.is_char_boundary(*cut));
    why.truncate(cut.unwrap_or(0));
    SupervisorReply::Refused { code, why }
}

impl Tickets {
    /// Of a program whose images go to this store.
    pub(super) fn new(store: PathBuf) -> Self {
        Self { store, last: 0, all: Vec::new(), dump: None, is_over: false }
    }

    /// A process of the program asks for an image of this name. Those who ask for the same one before the program is
    /// stopped for it share it.
    pub(super) fn ask_for(&mut self, name: &str) -> SupervisorReply {
        if self.is_over {
            return refused(code::ENDING, "the program was asked to end");
        }
        if !name.is_empty()
            && let Err(why) = check_name(name)
        {
            return refused(code::BAD_NAME, why);
        }
        if name == stores::LATEST {
            return refused(code::BAD_NAME, "that name stands for the newest image");
        }
        let is_open = self.dump.as_mut().is_some_and(|dump| !dump.has_stopped());
        let shared = self.all.iter().find(|ticket| {
            let is_early =
                ticket.state == State::Waits || is_open && ticket.state == State::IsServed;
            ticket.name == name && is_early
        });
        if let Some(Ticket { number: ticket, .. }) = shared {
            return SupervisorReply::Accepted { ticket: *ticket };
        }
        let is_taken = stores::in_store(&self.store, name).symlink_metadata().is_ok();
        if !name.is_empty() && is_taken {
            return refused(code::TAKEN, "the store has an image of that name");
        }
        let is_done = |ticket: &Ticket| matches!(ticket.state, State::Done(_));
        if self.all.len() >= MOST {
            match self.all.iter().position(is_done) {
                Some(oldest) => drop(self.all.remove(oldest)),
                None => return refused(code::BUSY, "too many images were asked for"),
            }
        }
        self.last += 1;
        let (number, name) = (self.last, name.to_owned());
        self.all.push(Ticket { number, name, state: State::Waits });
        SupervisorReply::Accepted { ticket: number }
    }

    /// What has become of a request.
    pub(super) fn state_of(&self, number: u64) -> SupervisorReply {
        match self.all.iter().find(|ticket| ticket.number == number).map(|ticket| &ticket.state) {
            Some(State::Waits | State::IsServed) => SupervisorReply::Pending {},
            Some(State::Done(Ok(()))) => SupervisorReply::Saved {},
            Some(State::Done(Err((code, why)))) => refused(*code, why),
            None => refused(code::NOT_WATCHED, "the gpucr run that was asked is there no more"),
        }
    }

    /// The request to serve next, by its number and name.
    pub(super) fn next(&self) -> Option<(u64, String)> {
        let next = self.all.iter().find(|ticket| ticket.state == State::Waits)?;
        Some((next.number, next.name.clone()))
    }

    /// A dump is under way for this one.
    pub(super) fn is_served(&mut self, number: u64, events: EventPipe) {
        self.set(number, State::IsServed);
        self.dump = Some(Dump { events, has_stopped: false });
    }

    /// Its dump is over.
    pub(super) fn is_done(&mut self, number: u64, outcome: Result<(), (i32, String)>) {
        self.set(number, State::Done(outcome));
        self.dump = None;
    }

    fn set(&mut self, number: u64, state: State) {
        if let Some(ticket) = self.all.iter_mut().find(|ticket| ticket.number == number) {
            ticket.state = state;
        }
    }

    /// The program has ended: nobody asks any more.
    pub(super) fn forget(&mut self) {
        self.all.clear();
        self.dump = None;
    }

    /// The program was asked to end: nothing is saved any more.
    pub(super) fn refuse_all(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        for ticket in self.all.iter_mut().filter(|ticket| ticket.state == State::Waits) {
            ticket.state = State::Done(Err((code::ENDING, "the program was asked to end".into())));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn code_of(reply: SupervisorReply) -> i32 {
        match reply {
            SupervisorReply::Refused { code, .. } => code,
            other => panic!("{other:?}"),
        }
    }

    fn ticket(reply: SupervisorReply) -> u64 {
        match reply {
            SupervisorReply::Accepted { ticket } => ticket,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_program_cannot_name_a_path() {
        let mut tickets = Tickets::new("/nowhere".into());
        for name in ["../a", "/etc/passwd", ".hidden", "a/b", "a\0b", ".."] {
            assert_eq!(code_of(tickets.ask_for(name)), code::BAD_NAME, "{name:?}");
        }
        assert_eq!(code_of(tickets.ask_for(&"n".repeat(201))), code::BAD_NAME);
        assert!(tickets.next().is_none());
    }

    #[test]
    fn those_who_ask_before_the_program_is_stopped_share_an_image() {
        let mut tickets = Tickets::new("/nowhere".into());
        let first = ticket(tickets.ask_for("a"));
        assert_eq!(ticket(tickets.ask_for("a")), first);
        let other = ticket(tickets.ask_for("b"));
        assert_ne!(other, first);
        assert_eq!(tickets.next(), Some((first, "a".into())));
        // Its dump says that the program is stopped as soon as somebody writes to it.
        let mut command = Command::new("sh");
        let script = r#"read x; printf '{"event":"phase","phase":"gate"}\n' > $2"#;
        command.args(["-c", script, "sh"]).stdin(Stdio::piped());
        let (events, theirs) = EventPipe::of(&mut command).unwrap();
        let mut child = command.spawn().unwrap();
        drop(theirs);
        tickets.is_served(first, events);
        assert_eq!(tickets.state_of(first), SupervisorReply::Pending {});
        assert_eq!(ticket(tickets.ask_for("a")), first);
        drop(child.stdin.take());
        child.wait().unwrap();
        let late = ticket(tickets.ask_for("a"));
        assert_ne!(late, first);
        tickets.is_done(first, Ok(()));
        assert_eq!(tickets.state_of(first), SupervisorReply::Saved {});
        assert_eq!(tickets.next(), Some((other, "b".into())));
        tickets.is_done(other, Err((code::NOT_SAVED, "w".repeat(9999))));
        assert_eq!(code_of(tickets.state_of(other)), code::NOT_SAVED);
        tickets.refuse_all();
        assert_eq!(code_of(tickets.state_of(late)), code::ENDING);
        assert_eq!(code_of(tickets.ask_for("")), code::ENDING);
        tickets.forget();
        assert_eq!(code_of(tickets.state_of(first)), code::NOT_WATCHED);
    }

    #[test]
    fn what_is_asked_for_is_bounded() {
        let store = std::env::temp_dir().join(format!("gpucr-tickets-{}", std::process::id()));
        std::fs::create_dir_all(store.join("images/there")).unwrap();
        let mut tickets = Tickets::new(store.clone());
        assert_eq!(code_of(tickets.ask_for("there")), code::TAKEN);
        std::fs::remove_dir_all(store).unwrap();
        let first = ticket(tickets.ask_for("0"));
        for number in 1..MOST {
            ticket(tickets.ask_for(&number.to_string()));
        }
        assert_eq!(code_of(tickets.ask_for("more")), code::BUSY);
        tickets.is_done(first, Ok(()));
        ticket(tickets.ask_for("more"));
        assert_eq!(code_of(tickets.state_of(first)), code::NOT_WATCHED, "it was forgotten");
        let reply = refused(code::NOT_SAVED, &"\u{e9}".repeat(LONGEST_REASON));
        assert!(
            matches!(reply, SupervisorReply::Refused { why, .. } if why.len() == LONGEST_REASON)
        );
    }
}
