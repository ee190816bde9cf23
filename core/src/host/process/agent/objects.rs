//! What is asked of an agent about multicast objects, which several processes have together.

use std::os::fd::{AsFd, OwnedFd};

use gpucr_wire::peers::Identity;
use gpucr_wire::{MulticastObject, Reply, Request};

use super::{Agent, AgentError};
use crate::host::process::answers;

impl Agent {
    /// Has the gate stay closed from now on, even if this connection ends: multicast objects are about to be undone.
    ///
    /// # Errors
    /// The gate is not closed, the agent does not answer in time, or gpucr was asked to end.
    pub fn part(&mut self) -> Result<(), AgentError> {
        self.carry_out(&Request::Part {})
    }

    /// What other processes call this one, and its multicast objects.
    ///
    /// # Errors
    /// The agent does not answer in time, what it says cannot be so, or gpucr was asked to end.
    pub fn objects(&mut self) -> Result<(Identity, Vec<MulticastObject>), AgentError> {
        let Reply::Objects { identity, objects } = self.ask(&Request::Objects {})? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        self.plausible(answers::objects(&objects))?;
        Ok((identity, objects))
    }

    /// Has what there is of its multicast objects undone, and these created again: a descriptor of each.
    ///
    /// # Errors
    /// The driver refuses it, the agent does not answer in time, or gpucr was asked to end. It may be tried again.
    pub fn make_objects(&mut self, objects: Vec<u64>) -> Result<Vec<OwnedFd>, AgentError> {
        let count = objects.len();
        let Reply::Made {} = self.ask(&Request::Make { objects })? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        let received = self.connection.receive_fds(count);
        self.checked(received)
    }

    /// Hands over objects that processes have made, and has it add its devices; `present` are those who take part.
    ///
    /// # Errors
    /// As with [`make_objects`](Self::make_objects), from which on it may be tried again.
    pub fn join_objects(
        &mut self,
        objects: &[(u64, &OwnedFd)],
        present: &[Identity],
    ) -> Result<(), AgentError> {
        let _room = self.room(objects.len() as u64);
        let ids = objects.iter().map(|(id, _)| *id).collect();
        let fds: Vec<_> = objects.iter().map(|(_, fd)| fd.as_fd()).collect();
        self.hand_over(&Request::Join { objects: ids, present: present.to_vec() }, &fds)
    }

    /// Has it bind and map what was bound and mapped.
    ///
    /// # Errors
    /// As with [`make_objects`](Self::make_objects), from which on it may be tried again.
    pub fn bind_objects(&mut self) -> Result<(), AgentError> {
        self.carry_out(&Request::Bind {})
    }

    /// Says that all processes have done that: the gate may be opened.
    ///
    /// # Errors
    /// Something is still undone, the agent does not answer in time, or gpucr was asked to end.
    pub fn objects_are_whole(&mut self) -> Result<(), AgentError> {
        self.carry_out(&Request::Whole {})
    }
}
