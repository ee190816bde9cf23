//! How to get at arguments.

/// The first arguments of a call, for names. The functions that share a decoder differ in their last one, the
/// stream: where a function has none, the call is for the default stream, which is 0.
pub(super) fn named<const N: usize>(arguments: &[usize]) -> [usize; N] {
    debug_assert!(arguments.len() + 1 >= N, "driver.table names a decoder for another function");
    std::array::from_fn(|at| arguments.get(at).copied().unwrap_or(0))
}

/// The last argument of a call.
pub(super) fn last(arguments: &[usize]) -> u64 {
    arguments.last().map_or(0, |last| *last as u64)
}

/// Reads what an argument points to; `None` for a null pointer, which the driver refuses.
///
/// # Safety
/// The argument is null or points to `T`, as the function's signature says.
pub(super) unsafe fn at<T: Copy>(address: usize) -> Option<T> {
    // SAFETY: the caller's duty.
    (address != 0).then(|| unsafe { (address as *const T).read_unaligned() })
}

/// Reads the member `number` of an array; `None` if there is no array.
///
/// # Safety
/// The argument is null or points to an array of `T` with such a member, as the function's signature says.
pub(super) unsafe fn member<T: Copy>(array: usize, number: usize) -> Option<T> {
    // SAFETY: the caller's duty.
    unsafe { at(if array == 0 { 0 } else { array + number * size_of::<T>() }) }
}
