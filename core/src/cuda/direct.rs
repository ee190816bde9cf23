//! Copies straight to the host, one chunk at a time on each worker.

use super::driver::DriverError;
use super::span::Span;
use super::transfer::{Queue, Slot, TransferError, Work, on_all};
use crate::store::ChunkId;

/// Copies what a queue gives straight to the host, on all workers.
pub(super) fn copy_out<E: Send>(
    workers: &mut [[Slot; 2]],
    begin: impl Fn() -> Result<(), DriverError> + Sync,
    work: &Work<'_, impl Queue>,
    take: &(impl Fn(Span, &[u8], Option<ChunkId>) -> Result<(), E> + Sync),
) -> Result<(), TransferError<E>> {
    let &Work { queue, stop, stream, .. } = work;
    let claim = || if stop.is_set() { None } else { queue.next() };
    let worker = |slots: &mut [Slot; 2]| -> Result<(), TransferError<E>> {
        begin()?;
        let issue = |slot: &mut Slot| -> Result<Option<Span>, DriverError> {
            let Some(span) = claim() else { return Ok(None) };
            stream.copy_out(span.address, &mut slot.staging, span.len)?;
            stream.record(&slot.event)?;
            Ok(Some(span))
        };
        let [a, b] = slots;
        let (mut current, mut other) = (a, b);
        let mut pending = issue(current)?;
        while let Some(span) = pending {
            pending = issue(other)?;
            current.event.wait()?;
            if queue.arrived(&span) {
                take(span, &current.staging.bytes()[..span.len], None)
                    .map_err(TransferError::Chunk)?;
            }
            std::mem::swap(&mut current, &mut other);
        }
        Ok(())
    };
    on_all(workers, stop, &worker)
}
