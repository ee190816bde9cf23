//! Reading and writing surfaces.

use super::images::{F32, LAYERED, S32, SURFACE, U8, U16, U32, Words, job, kernel, picture};
use super::job::{Job, Kind, Launch, Picture, bytes32};

pub(crate) fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    surfaces(&mut jobs);
    jobs
}

/// A surface is written in one launch and read in the next one.
fn surface_job(
    write: &str,
    read: &str,
    picture: &Picture,
    rows: &[Words],
    expected: &[u32],
) -> Job {
    let mut job = job("and back", write, picture, rows, |_, _| [0; 4]);
    let second = kernel(read).replace(".visible .entry k", ".visible .entry l");
    let (_, body) = second.split_once(".address_size 64\n").expect("the head");
    job.ptx.push_str(body);
    let Launch { shape, ref arguments, .. } = job.launches[0];
    job.launches.push(Launch { kernel: "l", shape, arguments: arguments.clone() });
    job.name = format!("{write} {read}");
    job.expected = bytes32(expected);
    job.kind = Kind::B32;
    job
}

fn surfaces(jobs: &mut Vec<Job>) {
    let rows: Vec<Words> = (0..91).map(|i| [i % 13, i / 13, 1000 + 7 * i, 50 + i]).collect();
    for (width, shift) in [(8, 0), (16, 1), (32, 2)] {
        let format = [U8, U16, U32][shift];
        let picture = picture([13, 7, 0], format, 2).flags(SURFACE);
        let (from, to) = if width == 32 {
            ("{%i2, %i3}".to_owned(), "{%o0, %o1}".to_owned())
        } else {
            ("{%h0, %h1}".to_owned(), "{%h0, %h1}".to_owned())
        };
        let narrow = "cvt.u16.u32 %h0, %i2; cvt.u16.u32 %h1, %i3; ";
        let widen = "cvt.u32.u16 %o0, %h0; cvt.u32.u16 %o1, %h1;";
        let (narrow, widen) = if width == 32 { ("", "") } else { (narrow, widen) };
        let scale = format!("shl.b32 %i4, %i0, {};", shift + 1);
        let write =
            format!("{narrow}{scale} sust.b.2d.v2.b{width}.trap [%s, {{%i4, %i1}}], {from};");
        let read = format!("{scale} suld.b.2d.v2.b{width}.trap {to}, [%s, {{%i4, %i1}}]; {widen}");
        let kept = if width == 32 { u32::MAX } else { (1 << width) - 1 };
        let expected: Vec<u32> =
            rows.iter().flat_map(|row| [row[2] & kept, row[3] & kept, 0, 0]).collect();
        jobs.push(surface_job(&write, &read, &picture, &rows, &expected));
    }
    beyond(jobs);
    reductions(jobs, &rows);
    let texts = [
        ("1d", [91, 0, 0], 0, "{%i5}"),
        ("3d", [13, 7, 2], 0, "{%i4, %i1, %i6, %i6}"),
        ("a1d", [91, 0, 2], LAYERED, "{%i6, %i5}"),
        ("a2d", [13, 7, 2], LAYERED, "{%i6, %i4, %i1, %i1}"),
    ];
    for (geometry, size, flags, place) in texts {
        let picture = picture(size, U32, 1).flags(flags | SURFACE);
        let prepare = "shl.b32 %i4, %i0, 2; mad.lo.u32 %i5, %i1, 13, %i0; shl.b32 %i5, %i5, 2; mov.u32 %i6, 1;";
        let write = format!("{prepare} sust.b.{geometry}.b32.trap [%s, {place}], {{%i2}};");
        let read = format!("{prepare} suld.b.{geometry}.b32.trap {{%o0}}, [%s, {place}];");
        let expected: Vec<u32> = rows.iter().flat_map(|row| [row[2], 0, 0, 0]).collect();
        jobs.push(surface_job(&write, &read, &picture, &rows, &expected));
    }
}

/// Beside a surface: nothing is written and zeros are read, or the element at the edge is meant.
fn beyond(jobs: &mut Vec<Job>) {
    let picture = picture([4, 3, 0], U32, 1).flags(SURFACE);
    let rows: Vec<Words> =
        (0..40).map(|i| [(i % 8) * 4, i / 8, 0, 0].map(|n: u32| n.wrapping_sub(8))).collect();
    for (edge, clamps) in [("zero", false), ("clamp", true)] {
        let text =
            format!("add.s32 %i1, %i1, 7; suld.b.2d.b32.{edge} {{%o0}}, [%s, {{%i0, %i1}}];");
        jobs.push(job("beside the surface", &text, &picture, &rows, move |picture, row| {
            let (x, y) = (i64::from(row[0] as i32) / 4, i64::from(row[1] as i32) + 7);
            let inside = (0..4).contains(&x) && (0..3).contains(&y);
            let at = [x.clamp(0, 3), y.clamp(0, 2), 0];
            let value = if inside || clamps { picture.stored(0, at, 0) } else { 0 };
            [value, 0, 0, 0]
        }));
    }
}

fn reductions(jobs: &mut Vec<Job>, rows: &[Words]) {
    type Join = fn(u32, u32) -> u32;
    let joins: [(&str, &str, Join); 5] = [
        ("add", "u32", |a, b| a.wrapping_add(b)),
        ("min", "s32", |a, b| (a as i32).min(b as i32) as u32),
        ("max", "u32", |a, b| a.max(b)),
        ("and", "b32", |a, b| a & b),
        ("or", "b32", |a, b| a | b),
    ];
    for (name, ty, join) in joins {
        let format = if ty == "s32" { S32 } else { U32 };
        let picture = picture([13, 7, 0], format, 1).flags(SURFACE);
        let scale = "shl.b32 %i4, %i0, 2;";
        let write = format!("{scale} sured.b.{name}.2d.{ty}.trap [%s, {{%i4, %i1}}], %i2;");
        let read = format!("{scale} suld.b.2d.b32.trap {{%o0}}, [%s, {{%i4, %i1}}];");
        let expected: Vec<u32> = rows
            .iter()
            .flat_map(|row| {
                let at = [i64::from(row[0]), i64::from(row[1]), 0];
                [join(picture.stored(0, at, 0), row[2]), 0, 0, 0]
            })
            .collect();
        jobs.push(surface_job(&write, &read, &picture, rows, &expected));
    }
    // A formatted store counts elements.
    let picture = picture([13, 7, 0], F32, 1).flags(SURFACE);
    let write = "sust.p.2d.b32.trap [%s, {%i0, %i1}], {%i2};";
    let read = "shl.b32 %i4, %i0, 2; suld.b.2d.b32.trap {%o0}, [%s, {%i4, %i1}];";
    let expected: Vec<u32> = rows.iter().flat_map(|row| [row[2], 0, 0, 0]).collect();
    jobs.push(surface_job(write, read, &picture, rows, &expected));
}
