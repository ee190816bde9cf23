//! User objects, which graphs keep alive.

use std::sync::Arc;

use super::arguments::Out;
use super::driver_api;
use super::stream::HostFunction;
use crate::graphs;
use crate::host_calls::HostCall;
use crate::status::{Code, Outcome};
use crate::user_objects::{self, Held, USER_OBJECTS, UserObject};

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which must be given.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the caller's references become the graph's.
const MOVE: u32 = 1;

fn find(handle: u64) -> Outcome<Arc<UserObject>> {
    USER_OBJECTS.get(handle).ok_or(Code::INVALID_VALUE)
}

fn check(count: u32) -> Outcome {
    if count == 0 { Err(Code::INVALID_VALUE) } else { Ok(()) }
}

driver_api! {
    call fn cuUserObjectCreate(
        out: Out<u64>, data: u64, destroy: HostFunction, references: u32, flags: u32,
    ) {
        out.check()?;
        check(references)?;
        let function = destroy.ok_or(Code::INVALID_VALUE)?;
        if flags != NO_DESTRUCTOR_SYNC {
            return Err(Code::INVALID_VALUE);
        }
        out.set(user_objects::create(HostCall { function, data }, references.into()).handle)
    }

    call fn cuUserObjectRetain(object: u64, count: u32) {
        check(count)?;
        find(object)?.retain(count.into());
        Ok(())
    }

    call fn cuUserObjectRelease(object: u64, count: u32) {
        check(count)?;
        find(object)?.release(count.into())
    }

    call fn cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32) {
        check(count)?;
        if flags & !MOVE != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let object = find(object)?;
        graphs::nodes(graph)?;
        if flags & MOVE == 0 {
            object.retain(count.into());
        }
        graphs::hold(graph, Held::new(object, count.into()))
    }

    call fn cuGraphReleaseUserObject(graph: u64, object: u64, count: u32) {
        check(count)?;
        find(object)?;
        graphs::release(graph, object, count.into())
    }
}
