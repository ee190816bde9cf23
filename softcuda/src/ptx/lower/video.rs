//! Video instructions.

use super::{Lower, Lowered};
use crate::ptx::ast::{Operand, Type};
use crate::ptx::code::Op;
use crate::ptx::kernels::video::{Act, Second, Video, video};

/// What a name stands for, without the number of parts at its end.
fn act(name: &str) -> Option<Act> {
    Some(match name {
        "vadd" => Act::Add,
        "vsub" => Act::Subtract,
        "vavrg" => Act::Average,
        "vabsdiff" => Act::Difference,
        "vmin" => Act::Least,
        "vmax" => Act::Greatest,
        "vshl" => Act::ShiftLeft,
        "vshr" => Act::ShiftRight,
        "vmad" => Act::MultiplyAdd,
        _ => return None,
    })
}

fn comparison(name: &str) -> Option<Act> {
    Some(match name {
        "eq" => Act::Equal,
        "ne" => Act::NotEqual,
        "lt" => Act::Less,
        "le" => Act::LessEqual,
        "gt" => Act::Greater,
        "ge" => Act::GreaterEqual,
        _ => return None,
    })
}

fn second(name: &str) -> Option<Second> {
    match name {
        "add" => Some(Second::Add),
        "min" => Some(Second::Least),
        "max" => Some(Second::Greatest),
        _ => None,
    }
}

/// The width of a part, and its number: `b2` or `h1`; nothing is all 32 bits.
fn part(selector: &str) -> Option<(u32, u8)> {
    match selector.split_at_checked(1)? {
        ("b", "0") => Some((8, 0)),
        ("b", "1") => Some((8, 1)),
        ("b", "2") => Some((8, 2)),
        ("b", "3") => Some((8, 3)),
        ("h", "0") => Some((16, 0)),
        ("h", "1") => Some((16, 1)),
        _ => None,
    }
}

/// The numbers behind a letter, the last for the lowest part.
fn numbers(selector: &str, letter: char, most: u8) -> Option<Vec<u8>> {
    let digits = selector.strip_prefix(letter)?;
    let number = |digit: u8| digit.checked_sub(b'0').filter(|number| *number <= most);
    digits.bytes().rev().map(number).collect()
}

impl<'a> Lower<'_, 'a> {
    /// The register or value of an operand, what is selected of it, and whether it has a minus.
    fn selected(&self, operand: &Operand<'a>) -> (Operand<'a>, &'a str, bool) {
        match *operand {
            Operand::Part(register, selector, negative) => {
                (Operand::Register(register), selector, negative)
            }
            ref other => (other.clone(), "", false),
        }
    }

    pub(super) fn video(&mut self, opcode: &str) -> Lowered<()> {
        let (name, side_by_side) = match opcode.strip_suffix(['2', '4']) {
            Some(name) if opcode.ends_with('2') => (name, 2),
            Some(name) => (name, 4),
            None => (opcode, 1),
        };
        let compares = name == "vset";
        let (b_type, a_type) = (self.ty()?, self.ty()?);
        let result_type = if compares { Type::U32 } else { self.ty()? };
        let all = [result_type, a_type, b_type];
        if !all.iter().all(|ty| matches!(ty, Type::U32 | Type::S32)) {
            return Err(self.unsupported());
        }
        let plus_one = name == "vmad" && self.has("po");
        let act = if compares { self.find(comparison) } else { act(name) };
        let act = act.ok_or_else(|| self.unsupported())?;
        let shifts = matches!(act, Act::ShiftLeft | Act::ShiftRight);
        let wraps = shifts && self.has("wrap");
        if shifts && !wraps && !self.has("clamp") {
            return Err(self.unsupported());
        }
        let shift = match () {
            () if name != "vmad" => 0,
            () if self.has("shr7") => 7,
            () if self.has("shr15") => 15,
            () => 0,
        };
        let saturate = !compares && self.has("sat");
        let second = if name == "vmad" { None } else { self.find(second) };
        self.done()?;
        let signed = all.map(|ty| ty == Type::S32);
        let video = Video {
            act,
            second: second.unwrap_or(Second::Nothing),
            signed,
            saturate,
            wraps,
            width: 32 / side_by_side,
            widths: [32 / side_by_side; 2],
            parts: [[0; 4]; 2],
            joined: side_by_side > 1,
            mask: 1,
            negative: [false; 3],
            plus_one,
            shift,
        };
        if side_by_side > 1 { self.video_vector(video) } else { self.video_scalar(video) }
    }

    fn video_scalar(&mut self, mut video: Video) -> Lowered<()> {
        let operands = self.current.map_or(&[][..], |current| &current.operands);
        let (to, a, b, c) = match operands {
            [to, a, b] if video.second == Second::Nothing => (to, a, b, None),
            [to, a, b, c] => (to, a, b, Some(c)),
            _ => return Err(self.position.mistyped("wrong number of operands")),
        };
        let (to, selector, _) = self.selected(to);
        let multiplies = video.act == Act::MultiplyAdd;
        if selector.is_empty() != (c.is_none() || multiplies || video.second != Second::Nothing) {
            return Err(self.position.mistyped("a part of the result goes into a third source"));
        }
        let wrong = self.position.mistyped("expected a byte or a half of a register");
        if !selector.is_empty() {
            let (width, index) = part(selector).ok_or_else(|| wrong.clone())?;
            (video.second, video.width, video.mask) = (Second::Merge, width, 1 << index);
        }
        let mut sources = Vec::new();
        for (source, operand) in [a, b].into_iter().enumerate() {
            let (operand, selector, negative) = self.selected(operand);
            if !selector.is_empty() {
                let (width, index) = part(selector).ok_or_else(|| wrong.clone())?;
                (video.widths[source], video.parts[source][0]) = (width, index);
            }
            video.negative[source] = negative;
            sources.push(operand);
        }
        let mut third = Operand::Integer(0);
        if let Some(c) = c {
            let (operand, selector, negative) = self.selected(c);
            if !selector.is_empty() {
                return Err(wrong);
            }
            video.negative[2] = negative;
            third = operand;
        }
        let negatives = video.negative.iter().filter(|negative| **negative).count();
        if negatives > 0 && (!multiplies || video.plus_one) || (multiplies && c.is_none()) {
            return Err(self.unsupported());
        }
        sources.push(third);
        self.push_video(&video, &to, &sources)
    }

    fn video_vector(&mut self, mut video: Video) -> Lowered<()> {
        if matches!(video.second, Second::Least | Second::Greatest) {
            return Err(self.unsupported());
        }
        let [to, a, b, c] = self.operands()?;
        let count = 32 / video.width as u8;
        let letter = if count == 2 { 'h' } else { 'b' };
        let wrong = self.position.mistyped("no such parts of a register");
        let (to, selector, _) = self.selected(to);
        video.mask = if selector.is_empty() { (1 << count) - 1 } else { 0 };
        if !selector.is_empty() {
            let chosen = numbers(selector, letter, count - 1).filter(|chosen| !chosen.is_empty());
            for index in chosen.ok_or_else(|| wrong.clone())? {
                video.mask |= 1 << index;
            }
        }
        if video.second == Second::Nothing {
            video.second = Second::Merge;
        }
        let mut sources = Vec::new();
        for (source, operand) in [a, b].into_iter().enumerate() {
            let (operand, selector, negative) = self.selected(operand);
            let mut chosen: Vec<u8> = (0..count).map(|i| i + source as u8 * count).collect();
            if !selector.is_empty() {
                let given = numbers(selector, letter, 2 * count - 1);
                let given = given.filter(|given| given.len() == usize::from(count) && !negative);
                chosen = given.ok_or_else(|| wrong.clone())?;
            }
            video.parts[source][..usize::from(count)].copy_from_slice(&chosen);
            sources.push(operand);
        }
        sources.push(c.clone());
        self.push_video(&video, &to, &sources)
    }

    fn push_video(
        &mut self,
        description: &Video,
        to: &Operand<'a>,
        sources: &[Operand<'a>],
    ) -> Lowered<()> {
        let to = self.to(to, Type::U32)?;
        let mut registers = [self.constant(description.packed()); 4];
        for (register, source) in registers.iter_mut().zip(sources) {
            *register = self.src(source, Type::U32)?;
        }
        self.emit(Op::Map4(video(), to, registers));
        Ok(())
    }
}
