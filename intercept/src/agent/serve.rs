//! One connection: requests come, and each goes to the file of its family.

use gpucr_wire::{Connection, Hello, PROTOCOL_VERSION, Reply, Request};

use super::state::{Agent, Next};
use super::{blocks, gating, launches, multicast, socket, tracking, waiting};
use crate::abi::library;
use crate::log::log;
use crate::state::memory::Failure;
use crate::watch::{again, supervisor};

/// Serves a connection until it ends.
pub(super) fn serve(agent: &mut Agent, mut connection: Connection) {
    let mut greeted = false;
    loop {
        let request = match connection.receive() {
            Ok(request) => request,
            Err(error) => return log!("the connection ends: {error}"),
        };
        log!("request {request:?}");
        let next = match request {
            Request::Hello { protocol } if protocol == PROTOCOL_VERSION => {
                greeted = true;
                socket::answer_to_the_name();
                Ok(Next::Reply(Reply::Hello { hello: hello(agent) }))
            }
            // The checkpointer sees the other version and says so.
            Request::Hello { .. } => Ok(Next::Last(Reply::Hello { hello: hello(agent) })),
            _ if !greeted => {
                Ok(Next::Last(failed(Failure::other("the first request must be Hello"))))
            }
            request => handle(agent, request, &mut connection),
        };
        let (reply, last) = match next {
            Ok(Next::Reply(reply)) => (reply, false),
            Ok(Next::Last(reply)) => (reply, true),
            Ok(Next::Sent) => continue,
            Err(failure) => {
                log!("failed: {} (error {})", failure.message, failure.code);
                (failed(failure), false)
            }
        };
        if let Err(error) = connection.send(&reply) {
            return log!("cannot reply: {error}");
        }
        if last {
            return;
        }
    }
}

fn handle(
    agent: &mut Agent,
    request: Request,
    connection: &mut Connection,
) -> Result<Next, Failure> {
    match request {
        Request::Hello { .. } => unreachable!("served by serve()"),
        Request::Counts {} => Ok(gating::counts(agent)),
        Request::CloseGate { timeout_ms } => gating::close(agent, timeout_ms, connection),
        Request::Step { wait_ms, timeout_ms, keep } => {
            again::keep(keep);
            let stepped = gating::step(agent, wait_ms, timeout_ms, connection);
            again::stop();
            stepped
        }
        Request::Again { timeout_ms } => launches::again(agent, timeout_ms, connection),
        Request::Halt { wait_ms, timeout_ms, interrupt_ms } => {
            gating::halt(agent, wait_ms, timeout_ms, interrupt_ms, connection)
        }
        Request::Interrupted {} => gating::interrupted(agent),
        Request::Pass { wait_ms, busy_too } => gating::pass(agent, wait_ms, busy_too, connection),
        Request::OpenGate {} => gating::open(agent),
        Request::Export { known } => blocks::export(agent, known, connection),
        Request::Stage { len } => blocks::stage(agent, len, connection),
        Request::CopyOut { block, offset, len } => blocks::copy_out(agent, block, offset, len),
        Request::CopyIn { block, offset, len } => blocks::copy_in(agent, block, offset, len),
        Request::Detach {} => blocks::detach(agent),
        Request::Reattach { blocks } => blocks::reattach(agent, &blocks, connection),
        Request::Attach { blocks } => blocks::attach(agent, &blocks, connection),
        Request::Record { on } => Ok(launches::record(on)),
        Request::Accesses {} => launches::accesses(),
        Request::Image { id, limit } => launches::image(id, limit, connection),
        Request::Guard { ranges, summaries, distrusted } => {
            waiting::guard(agent, ranges, summaries, distrusted, connection)
        }
        Request::Await { blocks } => waiting::wait_for(agent, &blocks, connection),
        Request::Share { blocks, summaries } => {
            waiting::share(agent, blocks, summaries, connection)
        }
        Request::Track {} => tracking::track(connection),
        Request::Pinned {} => tracking::pinned(),
        Request::Restored {} => {
            supervisor::restored();
            Ok(Next::done())
        }
        Request::Meet { wait_ms } => gating::meet(agent, wait_ms, connection),
        Request::Fragile { wait_ms } => gating::fragile(agent, wait_ms, connection),
        Request::Part {} => multicast::part(agent),
        Request::Objects {} => Ok(multicast::objects()),
        Request::Make { objects } => multicast::make(agent, &objects, connection),
        Request::Join { objects, present } => {
            multicast::join(agent, &objects, &present, connection)
        }
        Request::Bind {} => multicast::bind(agent),
        Request::Whole {} => multicast::whole(agent),
    }
}

fn hello(agent: &Agent) -> Hello {
    let path = |path: Option<&std::path::Path>| {
        path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
    };
    Hello {
        protocol: PROTOCOL_VERSION,
        pid: std::process::id(),
        shim: path(library::own_file()),
        driver: path(library::library().map(|library| library.path.as_path())),
        driver_version: agent.driver_version,
        gate: agent.state,
    }
}

fn failed(failure: Failure) -> Reply {
    Reply::Failed { code: failure.code as i32, message: failure.message }
}
