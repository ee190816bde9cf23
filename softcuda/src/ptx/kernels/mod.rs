//! Lane loops: what one arithmetic instruction does to the 32 lanes of a warp.
//!
//! Each kernel exists twice, for any CPU and for CPUs with AVX2 and FMA; which of the two is
//! decided when a module is loaded.

pub(crate) mod compare;
pub(crate) mod convert;
mod exact;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod int;
mod round;
pub(crate) mod rounding;
pub(crate) mod tiny;
pub(crate) mod video;

use std::sync::LazyLock;

/// A value that a register's slot can hold.
pub(crate) trait Bits: Copy {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! integer_bits {
    ($($t:ty),*) => {$(
        impl Bits for $t {
            #[inline(always)]
            fn of(bits: u64) -> Self {
                bits as $t
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}
integer_bits!(u8, u16, u32, u64, i8, i16, i32, i64);

impl Bits for bool {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        bits & 1 != 0
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        u64::from(self)
    }
}

/// Every NaN that arithmetic produces is the same one, as on a GPU.
impl Bits for f32 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        u64::from(if self.is_nan() { 0x7fff_ffff } else { self.to_bits() })
    }
}

impl Bits for f64 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        if self.is_nan() { 0x7fff_ffff_ffff_ffff } else { self.to_bits() }
    }
}

/// Whether the faster kernels can run here.
pub(crate) fn fast_cpu() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static FAST: LazyLock<bool> = LazyLock::new(|| {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt")
                && is_x86_feature_detected!("f16c")
        });
        *FAST
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        static FAST: LazyLock<bool> = LazyLock::new(|| false);
        *FAST
    }
}

/// A kernel of the given arity from an expression over typed arguments.
macro_rules! kernel {
    ($map:ty, |$($x:ident: $t:ty),+| $e:expr) => {{
        use $crate::ptx::code::{Lanes, WIDTH};
        #[inline(always)]
        fn apply($($x: u64),+) -> u64 {
            $(let $x = <$t as $crate::ptx::kernels::Bits>::of($x);)+
            $crate::ptx::kernels::Bits::bits($e)
        }
        /// # Safety
        /// All pointers must be valid for a register.
        #[inline(always)]
        unsafe fn body(mask: u32, to: *mut Lanes, $($x: *const Lanes),+) {
            if mask == u32::MAX {
                let mut result = [0; WIDTH];
                {
                    // SAFETY: the caller passes valid registers; nothing writes to them while
                    // these references live.
                    $(let $x = unsafe { &*$x };)+
                    for lane in 0..WIDTH {
                        result[lane] = apply($($x[lane]),+);
                    }
                }
                // SAFETY: as above, and no reference to a source lives any more.
                unsafe { *to = result };
            } else {
                let mut rest = mask;
                while rest != 0 {
                    let lane = rest.trailing_zeros() as usize;
                    rest &= rest - 1;
                    // SAFETY: valid registers, and a lane number is below `WIDTH`.
                    unsafe { (*to)[lane] = apply($((*$x)[lane]),+) };
                }
            }
        }
        /// # Safety
        /// As for `body`.
        unsafe fn plain(mask: u32, to: *mut Lanes, $($x: *const Lanes),+) {
            // SAFETY: the caller's promise is passed on.
            unsafe { body(mask, to, $($x),+) }
        }
        /// # Safety
        /// As for `body`; the CPU must have the features.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,bmi1,lzcnt,popcnt,f16c")]
        unsafe fn fast(mask: u32, to: *mut Lanes, $($x: *const Lanes),+) {
            // SAFETY: the caller's promise is passed on.
            unsafe { body(mask, to, $($x),+) }
        }
        #[cfg(target_arch = "x86_64")]
        let chosen: $map = if $crate::ptx::kernels::fast_cpu() { fast } else { plain };
        #[cfg(not(target_arch = "x86_64"))]
        let chosen: $map = plain;
        chosen
    }};
}
macro_rules! map1 {
    ($($k:tt)*) => { $crate::ptx::kernels::kernel!($crate::ptx::code::Map1, $($k)*) };
}
macro_rules! map2 {
    ($($k:tt)*) => { $crate::ptx::kernels::kernel!($crate::ptx::code::Map2, $($k)*) };
}
macro_rules! map3 {
    ($($k:tt)*) => { $crate::ptx::kernels::kernel!($crate::ptx::code::Map3, $($k)*) };
}
macro_rules! map4 {
    ($($k:tt)*) => { $crate::ptx::kernels::kernel!($crate::ptx::code::Map4, $($k)*) };
}
/// An expression with `$t` standing for the unsigned type of a PTX type's width.
macro_rules! by_width {
    ($ty:expr, $t:ident => $e:expr) => {
        match $ty.size() {
            1 => { type $t = u8; $e }
            2 => { type $t = u16; $e }
            4 => { type $t = u32; $e }
            _ => { type $t = u64; $e }
        }
    };
}
/// An expression with `$t` standing for the integer type of a PTX type.
macro_rules! by_int {
    ($ty:expr, $t:ident => $e:expr) => {
        match ($ty.is_signed(), $ty.size()) {
            (true, 1) => { type $t = i8; $e }
            (true, 2) => { type $t = i16; $e }
            (true, 4) => { type $t = i32; $e }
            (true, _) => { type $t = i64; $e }
            (false, 1) => { type $t = u8; $e }
            (false, 2) => { type $t = u16; $e }
            (false, 4) => { type $t = u32; $e }
            (false, _) => { type $t = u64; $e }
        }
    };
}
pub(crate) use {by_int, by_width, kernel, map1, map2, map3, map4};
