//! CUDA's device runtime: kernels that kernels launch, and what belongs to them.

use super::block::Room;
use super::context::Step;
use super::warp::Warp;
use crate::ptx::ast::Space;
use crate::ptx::code::{DeviceCall, FUNCTION_WINDOW, WINDOW_MASK};
use crate::ptx::launch::Child;
use crate::ptx::module::Module;

/// `cudaErrorMemoryAllocation`.
const NO_MEMORY: u32 = 2;
/// `cudaErrorInvalidDeviceFunction`.
const NO_FUNCTION: u32 = 98;

/// What a call gives: a number or an error, a `cudaError_t`.
type Answer = Result<u64, u32>;

/// The place of a `dim3` among the arguments.
fn three(words: [u64; 3]) -> [u32; 3] {
    words.map(|word| word as u32)
}

impl Warp<'_> {
    /// A call, for one lane after the other.
    pub(super) fn device_runtime(
        &mut self,
        room: &mut Room<'_>,
        mask: u32,
        call: DeviceCall,
        site: u32,
    ) -> Step<()> {
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let answer = self.device_call(room, lane, call, site)?;
            if let Err(error) = answer {
                self.errors[lane] = error;
            }
            let result = self.code.calls[site as usize].returns[0];
            // Those of 8 bytes give an address, the others an error.
            let (size, value) = match (result.size, answer) {
                (8, answer) => (8, answer.unwrap_or(0)),
                (_, Err(error)) => (4, u64::from(error)),
                (_, Ok(_)) if matches!(call, DeviceCall::LastError { .. }) => {
                    (4, answer.unwrap_or(0))
                }
                (_, Ok(_)) => (4, 0),
            };
            let address = self.frame_address(result.offset);
            self.poke(room, Space::Generic, lane, (address, size), value)?;
        }
        Ok(())
    }

    fn device_call(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        call: DeviceCall,
        site: u32,
    ) -> Step<Answer> {
        let launcher = room.context.launch.launcher;
        let module = room.context.module;
        Ok(match call {
            DeviceCall::Nothing => Ok(0),
            DeviceCall::LastError { taken } => {
                let error = self.errors[lane];
                if taken {
                    self.errors[lane] = 0;
                }
                Ok(error.into())
            }
            DeviceCall::Room => launcher.room(self.argument(room, lane, site, 1)?, None),
            DeviceCall::RoomOfLaunch => match self.child(room, lane, site, [0, 1, 2, 3], module)? {
                Some(child) => launcher.room(child.entry.param_bytes as u64, Some(&child)),
                None => Err(NO_FUNCTION),
            },
            DeviceCall::Launch => match self.child(room, lane, site, [0, 2, 3, 4], module)? {
                Some(child) => {
                    let place = self.argument(room, lane, site, 1)?;
                    let stream = self.argument(room, lane, site, 5)?;
                    launcher.launch(place, Some(&child), stream).map(|()| 0)
                }
                None => Err(NO_FUNCTION),
            },
            DeviceCall::LaunchOfRoom => {
                let place = self.argument(room, lane, site, 0)?;
                let stream = self.argument(room, lane, site, 1)?;
                launcher.launch(place, None, stream).map(|()| 0)
            }
            DeviceCall::Device => self.give(room, lane, site, 4, launcher.device().0.into())?,
            DeviceCall::DeviceCount => {
                self.give(room, lane, site, 4, launcher.device().1.into())?
            }
            DeviceCall::Handle => self.give(room, lane, site, 8, launcher.handle())?,
            DeviceCall::Allocate => {
                let size = self.argument(room, lane, site, 1)?;
                let address = room.context.launch.heap.allocate(size);
                self.give(room, lane, site, 8, address.unwrap_or(0))?.and(address.ok_or(NO_MEMORY))
            }
            DeviceCall::Free => {
                let address = self.argument(room, lane, site, 0)?;
                if address != 0 && !room.context.launch.heap.free(address) {
                    return Err(super::context::Fault::Free(address));
                }
                Ok(0)
            }
            DeviceCall::Copy => {
                let [to, from, size, _, stream] = self.arguments(room, lane, site)?;
                launcher.copy(to, from, size, stream).map(|()| 0)
            }
            DeviceCall::Fill => {
                let [to, value, size, stream] = self.arguments(room, lane, site)?;
                launcher.fill(to, value as u8, size, stream).map(|()| 0)
            }
        })
    }

    /// The first arguments.
    fn arguments<const N: usize>(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        site: u32,
    ) -> Step<[u64; N]> {
        let mut all = [0; N];
        for (index, argument) in all.iter_mut().enumerate() {
            *argument = self.argument(room, lane, site, index)?;
        }
        Ok(all)
    }

    /// Writes to the address that is the first argument.
    fn give(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        site: u32,
        size: u8,
        value: u64,
    ) -> Step<Answer> {
        let address = self.argument(room, lane, site, 0)?;
        self.poke(room, Space::Generic, lane, (address, size), value)?;
        Ok(Ok(0))
    }

    /// The launch that the arguments at four places describe: function, grid, block and shared memory. None if the first
    /// is no kernel's address.
    fn child<'m>(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        site: u32,
        [function, grid, block, shared]: [usize; 4],
        module: &'m Module,
    ) -> Step<Option<Child<'m>>> {
        let address = self.argument(room, lane, site, function)?;
        let grid = self.dimensions(room, lane, site, grid)?;
        let block = self.dimensions(room, lane, site, block)?;
        let dynamic_shared = self.argument(room, lane, site, shared)? as u32;
        let number = (address & !WINDOW_MASK) as usize;
        let mut entries = module.entries.iter();
        let entry = entries
            .find(|entry| address & WINDOW_MASK == FUNCTION_WINDOW && entry.function == number);
        Ok(entry.map(|entry| Child { entry, grid, block, dynamic_shared }))
    }

    /// An argument of the type `dim3`.
    fn dimensions(
        &mut self,
        room: &mut Room<'_>,
        lane: usize,
        site: u32,
        index: usize,
    ) -> Step<[u32; 3]> {
        let offset = self.code.calls[site as usize].args[index].offset;
        let mut words = [0; 3];
        for (word, at) in words.iter_mut().zip([0, 4, 8]) {
            let address = self.frame_address(offset) + at;
            *word = self.peek(room, Space::Generic, lane, address, 4)?;
        }
        Ok(three(words))
    }
}
