//! The slots of the driver's functions, and how a slot finds its target.
//!
//! A forwarded function is one instruction: a jump through its slot. Slots start out pointing at
//! stubs which look the real function up on the first call, because nothing may run before the
//! program's own code (a constructor that loads a driver would do that).

use std::arch::naked_asm;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::library;
use super::table::COUNT;
use super::types::{ERROR_NO_DEVICE, ERROR_NOT_FOUND};

/// The first target of a slot.
macro_rules! stub {
    ($name:ident, $index:literal) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "mov r11d, {index}",
                "jmp {resolve}",
                index = const $index,
                resolve = sym resolve_and_jump,
            )
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/slots.rs"));

/// A naked function that calls `$callee` with what is in `r11`, and goes on to the address that it gives as if
/// nothing had happened: arguments and stack are as they were.
macro_rules! call_and_jump {
    ($(#[$doc:meta])* $name:ident = $callee:ident) => {
        $(#[$doc])*
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                // `al` counts vector registers in a variadic call. Seven pushes and the return address
                // leave the stack on a multiple of 16, as the call below needs it.
                "push rax",
                "sub rsp, 128",
                "movdqu [rsp], xmm0",
                "movdqu [rsp + 16], xmm1",
                "movdqu [rsp + 32], xmm2",
                "movdqu [rsp + 48], xmm3",
                "movdqu [rsp + 64], xmm4",
                "movdqu [rsp + 80], xmm5",
                "movdqu [rsp + 96], xmm6",
                "movdqu [rsp + 112], xmm7",
                "mov rdi, r11",
                "call {callee}",
                "mov r11, rax",
                "movdqu xmm0, [rsp]",
                "movdqu xmm1, [rsp + 16]",
                "movdqu xmm2, [rsp + 32]",
                "movdqu xmm3, [rsp + 48]",
                "movdqu xmm4, [rsp + 64]",
                "movdqu xmm5, [rsp + 80]",
                "movdqu xmm6, [rsp + 96]",
                "movdqu xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp r11",
                callee = sym $callee,
            )
        }
    };
}
pub(crate) use call_and_jump;

call_and_jump! {
    /// Looks up the function whose position is in `r11`, and goes on to it.
    resolve_and_jump = resolve
}

/// Fills the slot `index` with the driver's function and returns that.
pub(crate) extern "C" fn resolve(index: u32) -> *const () {
    let index = index as usize;
    let target = match library::library() {
        Some(library) => library.function(index).unwrap_or(missing_function as *const ()),
        None => no_driver as *const (),
    };
    SLOTS[index].store(target.cast_mut(), Ordering::Relaxed);
    target
}

/// Stands in for a function that the real driver is too old to have.
extern "C" fn missing_function() -> u32 {
    ERROR_NOT_FOUND
}

/// Stands in for everything where there is no driver library at all.
extern "C" fn no_driver() -> u32 {
    ERROR_NO_DEVICE
}
