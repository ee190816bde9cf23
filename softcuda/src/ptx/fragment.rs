//! Where the elements of a matrix lie in the registers of a warp: the fragments of `mma` and `wmma`.
//!
//! Factors are seen as rows of the depth `k`: A by its rows, B by its columns. Those of `mma` lie as
//! the figures of the PTX ISA have them: four lanes hold a row, lane `l` parts of row `l / 4` and of
//! row `l / 4 + 8`. Where those of `wmma` lie is left open by PTX; here the elements are dealt to the
//! lanes in their order, as many to each.

use super::lanes::WIDTH;

/// What the elements of the factors of a matrix product are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    F64,
    E4m3,
    E5m2,
    S8,
    U8,
    S4,
    U4,
    B1,
}

/// What the sums of a matrix product are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    F32,
    F16,
    F64,
    S32,
}

/// The instruction that a fragment belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Mma,
    Wmma,
}

/// The most registers of a lane that a fragment takes.
pub(crate) const MOST_REGISTERS: usize = 8;

/// One matrix over the registers of a warp.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fragment {
    family: Family,
    is_sum: bool,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements that a register holds.
    pub(crate) per_register: usize,
    pub(crate) registers: usize,
    /// A register holds 64 bits, not 32.
    pub(crate) wide: bool,
}

impl Element {
    pub(crate) fn parse(name: &str) -> Option<Element> {
        Some(match name {
            "f16" => Element::F16,
            "bf16" => Element::Bf16,
            "tf32" => Element::Tf32,
            "f64" => Element::F64,
            "e4m3" => Element::E4m3,
            "e5m2" => Element::E5m2,
            "s8" => Element::S8,
            "u8" => Element::U8,
            "s4" => Element::S4,
            "u4" => Element::U4,
            "b1" => Element::B1,
            _ => return None,
        })
    }

    /// How many of them a register holds; one of 64 bits for `f64`, of 32 for the others.
    pub(crate) fn per_register(self) -> usize {
        match self {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 | Element::F64 => 1,
            Element::S8 | Element::U8 | Element::E4m3 | Element::E5m2 => 4,
            Element::S4 | Element::U4 => 8,
            Element::B1 => 32,
        }
    }

    /// Whether it is a floating-point number of eight bits.
    pub(crate) fn is_tiny(self) -> bool {
        matches!(self, Element::E4m3 | Element::E5m2)
    }

    pub(crate) fn is_integer(self) -> bool {
        match self {
            Element::F16 | Element::Bf16 | Element::Tf32 | Element::F64 => false,
            Element::E4m3 | Element::E5m2 => false,
            Element::S8 | Element::U8 | Element::S4 | Element::U4 | Element::B1 => true,
        }
    }
}

impl Sum {
    pub(crate) fn parse(name: &str) -> Option<Sum> {
        Some(match name {
            "f32" => Sum::F32,
            "f16" => Sum::F16,
            "f64" => Sum::F64,
            "s32" => Sum::S32,
            _ => return None,
        })
    }
}

impl Fragment {
    /// The rows of A, or the columns of B.
    pub(crate) fn factor(family: Family, element: Element, rows: usize, depth: usize) -> Fragment {
        let per_register = element.per_register();
        let registers = match (family, element) {
            // As on the first GPUs with `wmma`, where two lanes held the same elements.
            (Family::Wmma, Element::F16) => 8,
            _ => rows * depth / WIDTH / per_register,
        };
        let wide = element == Element::F64;
        Fragment { family, is_sum: false, rows, columns: depth, per_register, registers, wide }
    }

    /// C or D.
    pub(crate) fn sum(family: Family, sum: Sum, rows: usize, columns: usize) -> Fragment {
        let per_register = if sum == Sum::F16 { 2 } else { 1 };
        let registers = rows * columns / WIDTH / per_register;
        let wide = sum == Sum::F64;
        Fragment { family, is_sum: true, rows, columns, per_register, registers, wide }
    }

    /// Different elements that a lane holds.
    pub(crate) fn elements(&self) -> usize {
        self.rows * self.columns / WIDTH
    }

    /// The lowest bit of an element in its register.
    pub(crate) fn shift(&self, index: usize) -> usize {
        32 / self.per_register * (index % self.per_register)
    }

    /// Row and column of an element of a lane.
    pub(crate) fn place(&self, lane: usize, index: usize) -> (usize, usize) {
        let (group, thread) = (lane / 4, lane % 4);
        match (self.family, self.is_sum) {
            (Family::Mma, true) => (group + index / 2 * 8, thread * 2 + index % 2),
            (Family::Mma, false) => {
                let (n, halves) = (self.per_register, self.rows / 8);
                let row = group + 8 * (index / n % halves);
                (row, thread * n + index % n + index / (halves * n) * 4 * n)
            }
            (Family::Wmma, _) => {
                let at = lane * self.elements() + index % self.elements();
                (at / self.columns, at % self.columns)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_one_place() {
        let mut fragments = vec![Fragment::sum(Family::Wmma, Sum::F16, 8, 32)];
        for (element, rows, depth) in [
            (Element::F16, 16, 16),
            (Element::Tf32, 16, 4),
            (Element::F64, 8, 4),
            (Element::F64, 16, 16),
            (Element::U8, 16, 32),
            (Element::S4, 8, 32),
            (Element::B1, 16, 256),
        ] {
            fragments.push(Fragment::factor(Family::Mma, element, rows, depth));
            fragments.push(Fragment::factor(Family::Wmma, element, rows, depth));
        }
        for sum in [Sum::F16, Sum::F32, Sum::F64] {
            fragments.push(Fragment::sum(Family::Mma, sum, 8, 8));
            fragments.push(Fragment::sum(Family::Mma, sum, 16, 8));
        }
        for fragment in fragments {
            assert!(fragment.registers <= MOST_REGISTERS, "{fragment:?}");
            let mut seen = std::collections::BTreeSet::new();
            for lane in 0..WIDTH {
                for index in 0..fragment.elements() {
                    let (row, column) = fragment.place(lane, index);
                    assert!(row < fragment.rows && column < fragment.columns, "{fragment:?}");
                    assert!(seen.insert((row, column)), "{fragment:?}");
                }
            }
        }
    }
}
