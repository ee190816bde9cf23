//! Instructions across the lanes of a warp.

use super::atomic::apply;
use super::block::Room;
use super::context::{Fault, Step};
use super::warp::{Warp, for_lanes};
use crate::ptx::code::{AtomicType, Lanes, NONE, Op, ShuffleMode, VoteMode, WIDTH};

impl Warp<'_> {
    pub(super) fn collective(&mut self, room: &mut Room<'_>, op: &Op, mask: u32) -> Step<()> {
        match *op {
            Op::LoadMatrix { ref place, count, transposed, ref to } => {
                self.load_matrix(room, place, mask, (count, transposed), to)?;
            }
            Op::StoreMatrix { ref place, count, transposed, ref from } => {
                self.store_matrix(room, place, mask, (count, transposed), from)?;
            }
            Op::TransposeMatrix(to, from) => self.transpose_matrix(to, from, mask)?,
            Op::MultiplyMatrices(product) => {
                let code = self.code;
                self.multiply_matrices(&code.products[product as usize], mask)?;
            }
            Op::LoadFragment(index) => {
                let code = self.code;
                self.load_fragment(room, &code.fragments[index as usize], mask)?;
            }
            Op::StoreFragment(index) => {
                let code = self.code;
                self.store_fragment(room, &code.fragments[index as usize], mask)?;
            }
            Op::ClusterAddress(..) | Op::RankOfAddress(..) => {
                self.cluster_address(room, op, mask)?;
            }
            Op::Shuffle { mode, to, valid, value, lane, clamp } => {
                let (values, chosen) = (*self.lanes(value), *self.lanes(lane));
                let clamps = *self.lanes(clamp);
                let mut result: Lanes = [0; WIDTH];
                let mut inside = 0;
                for lane in 0..WIDTH {
                    let (source, valid) = shuffled(mode, lane, chosen[lane], clamps[lane]);
                    result[lane] = values[source];
                    inside |= u32::from(valid) << lane;
                }
                self.merge(to, mask, &result);
                if valid != NONE {
                    self.spread(valid, mask, inside);
                }
            }
            Op::ActiveMask(to) => self.write(to, mask, u64::from(mask)),
            Op::Vote { members, .. }
            | Op::Match { members, .. }
            | Op::Reduce { members, .. }
            | Op::Elect { members, .. } => {
                // Lanes may meet in one instruction and belong to different groups.
                let named = *self.lanes(members);
                let mut rest = mask;
                while rest != 0 {
                    let first = named[rest.trailing_zeros() as usize] as u32;
                    let mut group = 0;
                    for_lanes(rest, |lane| group |= u32::from(named[lane] as u32 == first) << lane);
                    rest &= !group;
                    self.among(op, group)?;
                }
            }
            _ => return Err(Fault::Instruction("an instruction that is not a collective one")),
        }
        Ok(())
    }

    /// One of the instructions among lanes that name the same members.
    fn among(&mut self, op: &Op, mask: u32) -> Step<()> {
        match *op {
            Op::Vote { mode, to, predicate, negated, members } => {
                let holding = self.holding(predicate);
                let holding = if negated { !holding } else { holding };
                let members = self.members(members, mask);
                let votes = holding & members;
                let value = match mode {
                    VoteMode::All => u64::from(votes == members),
                    VoteMode::Any => u64::from(votes != 0),
                    VoteMode::Uniform => u64::from(votes == members || votes == 0),
                    VoteMode::Ballot => u64::from(votes),
                };
                self.write(to, mask, value);
            }
            Op::Match { all, wide, to, valid, value, members } => {
                let kept = if wide { u64::MAX } else { 0xffff_ffff };
                let values = self.lanes(value).map(|value| value & kept);
                let members = self.members(members, mask);
                let mut result = [0; WIDTH];
                let mut same = 0;
                for_lanes(members, |lane| {
                    let mut equal = 0;
                    for_lanes(members, |other| {
                        equal |= u32::from(values[other] == values[lane]) << other;
                    });
                    result[lane] = u64::from(equal);
                    same |= u32::from(equal == members) << lane;
                    if all && equal != members {
                        result[lane] = 0;
                    }
                });
                self.merge(to, mask, &result);
                if valid != NONE {
                    self.spread(valid, mask, same);
                }
            }
            Op::Reduce { op, signed, to, value, members } => {
                let values = *self.lanes(value);
                let members = self.members(members, mask);
                let ty = if signed { AtomicType::Signed } else { AtomicType::Unsigned };
                let mut total: Option<u64> = None;
                for_lanes(members, |lane| {
                    let value = values[lane] & 0xffff_ffff;
                    total = Some(total.map_or(value, |sum| apply(op, ty, 4, sum, value, 0)));
                });
                self.write(to, mask, total.unwrap_or(0));
            }
            Op::Elect { to, valid, members } => {
                let leader = self.members(members, mask).trailing_zeros() % 32;
                self.write(to, mask, u64::from(leader));
                if valid != NONE {
                    self.spread(valid, mask, 1 << leader);
                }
            }
            _ => return Err(Fault::Instruction("an instruction that names no members")),
        }
        Ok(())
    }

    /// The member mask that the active lanes name, without lanes that are elsewhere.
    fn members(&self, members: u32, mask: u32) -> u32 {
        self.lanes(members)[mask.trailing_zeros() as usize] as u32 & mask
    }

    /// Writes one bit of `bits` to each lane's predicate.
    fn spread(&mut self, predicate: u32, mask: u32, bits: u32) {
        let lanes = self.lanes_mut(predicate);
        for_lanes(mask, |lane| lanes[lane] = u64::from(bits >> lane & 1));
    }
}

/// The lane a shuffle reads, and whether it lies inside the segment.
fn shuffled(mode: ShuffleMode, lane: usize, operand: u64, clamp: u64) -> (usize, bool) {
    let own = lane as i64;
    let operand = (operand & 31) as i64;
    let limit = (clamp & 31) as i64;
    let segment = (clamp >> 8 & 31) as i64;
    let least = own & segment;
    let most = least | (limit & !segment & 31);
    let (source, valid) = match mode {
        ShuffleMode::Up => (own - operand, own - operand >= most),
        ShuffleMode::Down => (own + operand, own + operand <= most),
        ShuffleMode::Butterfly => (own ^ operand, (own ^ operand) <= most),
        ShuffleMode::Index => {
            let source = least | (operand & !segment & 31);
            (source, source <= most)
        }
    };
    if valid { ((source & 31) as usize, true) } else { (lane, false) }
}
