//! Whether a kernel that is done twice leaves what it leaves when it is done once.
//!
//! [`code_of`] says what has to be known of a kernel's code for that; [`gpucr_wire::twice`] decides by it of each
//! launch. It is said only where the code proves it: the code is all that can run, it follows no pointer but
//! its arguments, and it depends on nothing but memory.
//!
//! `docs/access-sets.md` names what is taken for granted.

use gpucr_wire::access::KernelUse;
use gpucr_wire::twice::{Class, Code, Place, Twice};
use serde::Serialize;

use super::Kernels;

/// Launches of which doing them twice does the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Repeated {
    /// How many.
    pub launches: u64,
    /// To what the words of their arguments have pointed that may be pointers: allocations have numbers, in their
    /// order in the launch; 0 is what is not followed. None for launches that were not looked at one by one.
    pub places: Option<Vec<u8>>,
    /// Whether doing one twice is the same as doing it once; none if that is not known.
    pub idempotent: Option<bool>,
    /// Why it is not, or why that is not known.
    pub reason: Option<&'static str>,
}

/// What the code of a kernel does to memory.
///
/// # Errors
/// Why doing one of its launches twice can never be said to be the same.
pub(super) fn code_of(kernel: &KernelUse, kernels: &Kernels) -> Result<Code, &'static str> {
    let code = kernels.proof(kernel.id).ok_or("its code is not known")?;
    let params: Vec<(u32, u32)> =
        kernel.params.iter().map(|param| (param.offset, param.size)).collect();
    gpucr_kernels::code(code, &params)
}

/// What doing launches of a class twice does.
fn judged(class: &Class, code: &Result<Code, &'static str>) -> Repeated {
    let (idempotent, reason) = match code.as_ref().map(|code| code.twice(&class.places)) {
        Ok(Twice::Same) => (Some(true), None),
        Ok(Twice::Differs(why)) => (Some(false), Some(why.text())),
        Ok(Twice::Unknown(why)) => (None, Some(why.text())),
        Err(why) => (None, Some(*why)),
    };
    // Numbers that only bytes before them have are left out.
    let mut numbers = vec![0];
    let number = |place: &Place| {
        let known = numbers.iter().position(|number| *number == place.at);
        known.unwrap_or_else(|| {
            numbers.push(place.at);
            numbers.len() - 1
        }) as u8
    };
    let places = Some(class.places.iter().map(number).collect());
    Repeated { launches: class.launches, places, idempotent, reason }
}

/// What the launches of a kernel, as far as they were seen, would do if they were done twice: for each class, most
/// launches first.
pub(super) fn repeated(kernel: &KernelUse, kernels: &Kernels) -> Vec<Repeated> {
    let code = code_of(kernel, kernels);
    let mut all: Vec<Repeated> = kernel.classes.iter().map(|class| judged(class, &code)).collect();
    all.sort_by_key(|one| std::cmp::Reverse(one.launches));
    let known = all.iter().fold(0_u64, |sum, one| sum.saturating_add(one.launches));
    let launches = kernel.launches.saturating_sub(known);
    if launches > 0 {
        let reason = code.err().unwrap_or("not all arguments were noted");
        all.push(Repeated { launches, places: None, idempotent: None, reason: Some(reason) });
    }
    all
}

/// What is said of all launches of a kernel together: whether they are idempotent, if all are or none is, and the
/// reason of most of the others.
pub(super) fn together(all: &[Repeated]) -> (Option<bool>, Option<&'static str>) {
    let Some(first) = all.first() else { return (None, None) };
    let same = all.iter().all(|one| one.idempotent == first.idempotent);
    let reason = all.iter().find_map(|one| one.reason);
    (first.idempotent.filter(|_| same), reason)
}

#[cfg(test)]
mod tests {
    use gpucr_wire::access::Param;
    use gpucr_wire::twice::Numbers;

    use super::*;

    /// What is said of a class.
    type Said = (Option<bool>, Option<&'static str>);
    const SAME: Said = (Some(true), None);

    const fn unknown(reason: &'static str) -> Said {
        (None, Some(reason))
    }

    /// Two allocations, one behind the other, and what the program has mapped itself.
    const FIRST: u64 = 1;
    const SECOND: u64 = 2;
    const MAPPED: u64 = 3;
    /// Memory of a pool or of the host: no allocation is found for it.
    const ELSEWHERE: u64 = 0;

    fn image(body: &str) -> String {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\
             .global .align 8 .u64 total; .const .align 8 .u64 scale;\n\
             .extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);\n\
             .visible .entry k(.param .u64 a, .param .u64 b)\n{{\n\
             .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b64 %a, %b;\n\
             ld.param.u64 %a, [a]; ld.param.u64 %b, [b];\n{body}\nret;\n}}\n"
        )
    }

    /// A kernel of two words, and for each of its launches where they pointed: to the beginnings of allocations.
    fn launched(launches: &[[u64; 2]]) -> KernelUse {
        let class = |to: &[u64; 2]| {
            let mut numbers = Numbers::default();
            let mut number = |id: u64| numbers.of((id != ELSEWHERE).then_some(id), id == MAPPED);
            let places = to.map(|id| {
                let before = if id == SECOND { FIRST } else { ELSEWHERE };
                Place { at: number(id), before: number(before) }
            });
            Class { places: places.to_vec(), launches: 1 }
        };
        KernelUse {
            id: 1,
            name: "k".to_owned(),
            known: true,
            params: vec![Param { offset: 0, size: 8 }, Param { offset: 8, size: 8 }],
            launches: launches.len() as u64,
            classes: launches.iter().map(class).collect(),
            ..KernelUse::default()
        }
    }

    /// What is said of each launch.
    fn judged(image: &[u8], kernel: &KernelUse) -> Vec<Said> {
        let all = repeated(kernel, &Kernels::knowing(kernel, image));
        all.into_iter().map(|one| (one.idempotent, one.reason)).collect()
    }

    /// The same is said of all of these launches.
    #[track_caller]
    fn check(body: &str, launches: &[[u64; 2]], expected: Said) {
        let found = judged(image(body).as_bytes(), &launched(launches));
        assert_eq!(found, vec![expected; launches.len()], "{body} {launches:?}");
    }

    const COPY: &str = "ld.global.u32 %r1, [%b]; st.global.u32 [%a], %r1;";

    #[test]
    fn reading_one_allocation_and_writing_another_is_the_same_twice() {
        check(COPY, &[[FIRST, SECOND]], SAME);
        check(COPY, &[[FIRST, SECOND], [FIRST, MAPPED], [SECOND, FIRST]], SAME);
        check("st.global.u32 [%a], 7; st.global.u32 [%b], 7;", &[[FIRST, FIRST]], SAME);
        check("ld.global.u32 %r1, [%a];", &[[ELSEWHERE, ELSEWHERE]], SAME);
        check("ld.global.u32 %r1, [%a]; st.global.u32 [%a], %r1;", &[[FIRST, SECOND]], IN_PLACE);
        check("red.global.add.u32 [%a], 1;", &[[FIRST, SECOND]], IN_PLACE);
        let one = unknown("reads and writes one allocation");
        check(COPY, &[[FIRST, FIRST]], one);
    }

    const IN_PLACE: Said = (Some(false), Some("reads and writes one argument"));
    const NOT_FOLLOWED: Said = unknown("memory that is not followed");

    /// Pools, memory of the host, and variables whose address is an argument.
    #[test]
    fn memory_that_is_not_followed_may_be_any() {
        check(COPY, &[[FIRST, ELSEWHERE]], NOT_FOLLOWED);
        check(COPY, &[[ELSEWHERE, SECOND]], NOT_FOLLOWED);
        check(COPY, &[[ELSEWHERE, ELSEWHERE]], NOT_FOLLOWED);
        check("red.global.add.u32 [%a], 1;", &[[ELSEWHERE, FIRST]], NOT_FOLLOWED);
        check(COPY, &[[MAPPED, MAPPED]], unknown("memory mapped by the program"));
        check(COPY, &[[MAPPED, SECOND]], SAME);
    }

    #[test]
    fn variables_of_the_module_are_memory_too() {
        let variables = unknown("variables of its module");
        check("atom.global.add.u64 %rd1, [total], 1;", &[[FIRST, SECOND]], variables);
        let count =
            "ld.global.u64 %rd1, [total]; st.global.u64 [total], 3; st.global.u64 [%a], %rd1;";
        check(count, &[[FIRST, SECOND]], variables);
        let read = "ld.global.u64 %rd1, [total]; st.global.u64 [%a], %rd1;";
        check(read, &[[FIRST, SECOND]], SAME);
        // The variable may be what the argument points to.
        check(read, &[[ELSEWHERE, SECOND]], NOT_FOLLOWED);
        let constant = "ld.const.u64 %rd1, [scale]; st.global.u64 [%a], %rd1;";
        check(constant, &[[FIRST, SECOND]], SAME);
        check(constant, &[[ELSEWHERE, SECOND]], NOT_FOLLOWED);
        check("st.global.u64 [total], 3; ld.global.u32 %r1, [%b];", &[[FIRST, SECOND]], SAME);
        check("st.global.u64 [total], 3; ld.global.u32 %r1, [%b];", &[[FIRST, 0]], NOT_FOLLOWED);
    }

    #[test]
    fn more_than_memory_may_count() {
        let print = ".local .b64 x; mov.u64 %rd1, x; { .param .b64 f; .param .b64 v; .param .b32 r;
            st.param.b64 [f], %rd1; st.param.b64 [v], %rd1; call (r), vprintf, (f, v); }";
        for body in [
            "mov.u64 %rd1, %clock64; st.global.u64 [%a], %rd1;",
            "mov.u64 %rd1, %globaltimer; st.global.u64 [%a], %rd1;",
            "mov.u32 %r1, %smid; st.global.u32 [%a], %r1;",
            "activemask.b32 %r1; st.global.u32 [%a], %r1;",
            "frobnicate.u32 %r1; st.global.u32 [%a], %r1;",
            print,
        ] {
            check(body, &[[FIRST, SECOND]], unknown("more than memory counts"));
        }
        let place = "mov.u32 %r1, %tid.x; mov.u32 %r2, %laneid; mov.u32 %r3, %lanemask_lt;
            st.global.u32 [%a], %r1;";
        check(place, &[[FIRST, SECOND]], SAME);
    }

    #[test]
    fn pointers_in_memory_lead_anywhere() {
        let follow = "ld.global.u64 %rd1, [%a]; st.global.u32 [%rd1], 1;";
        check(follow, &[[FIRST, SECOND]], unknown("follows pointers in memory"));
    }

    /// Each launch is judged by its own arguments, and those that were not noted are not.
    #[test]
    fn launches_are_told_apart() {
        let mut kernel = launched(&[[FIRST, SECOND], [FIRST, FIRST]]);
        kernel.classes[0].launches = 10;
        kernel.launches = 15;
        let found = repeated(&kernel, &Kernels::knowing(&kernel, image(COPY).as_bytes()));
        let said = |one: &Repeated| (one.launches, one.places.clone(), one.idempotent, one.reason);
        assert_eq!(
            found.iter().map(said).collect::<Vec<_>>(),
            [
                (10, Some(vec![1, 2]), Some(true), None),
                (1, Some(vec![1, 1]), None, Some("reads and writes one allocation")),
                (4, None, None, Some("not all arguments were noted")),
            ]
        );
        assert_eq!(together(&found), (None, Some("reads and writes one allocation")));
        assert_eq!(together(&found[..1]), SAME);
        assert_eq!(together(&[]), (None, None));
    }

    /// The address behind an allocation is one of the next: code that goes down from there is in the first.
    #[test]
    fn an_argument_may_be_the_end_of_an_allocation() {
        let back = "ld.global.u32 %r1, [%b+-4]; st.global.u32 [%a], %r1;";
        check(back, &[[FIRST, SECOND]], unknown("reads and writes one allocation"));
        check(back, &[[SECOND, FIRST]], NOT_FOLLOWED);
        check("ld.global.u32 %r1, [%b+-4];", &[[SECOND, FIRST]], SAME);
    }

    /// The name says `k(int*, int const*)`, and machine code may have been made of other source.
    #[test]
    fn only_code_that_runs_is_a_proof() {
        let unknown = [unknown("its code is not known")];
        let mut kernel = launched(&[[FIRST, SECOND]]);
        kernel.name = "_Z1kPiPKi".to_owned();
        assert_eq!(judged(b"", &kernel), unknown);
        assert_eq!(judged(image(COPY).as_bytes(), &kernel), unknown, "code of another kernel");
        let renamed = image(COPY).replace(".entry k", ".entry _Z1kPiPKi");
        assert_eq!(judged(renamed.as_bytes(), &kernel), [SAME]);
        assert_eq!(judged(b"", &launched(&[[ELSEWHERE, ELSEWHERE]])), unknown);

        // scale(unsigned*, unsigned)
        let mut scale = launched(&[[FIRST, ELSEWHERE]]);
        scale.name = "scale".to_owned();
        scale.params[1].size = 4;
        scale.classes[0].places.truncate(1);
        macro_rules! fatbin {
            ($name:literal) => {
                include_bytes!(concat!("../../../../softcuda/tests/fatbin/", $name, ".fatbin"))
            };
        }
        assert_eq!(judged(fatbin!("plain"), &scale), [IN_PLACE]);
        assert_eq!(judged(fatbin!("both"), &scale), unknown);
    }
}
