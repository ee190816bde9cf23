//! Tests of what is drawn at random.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};

/// Numbers that look random and are the same in every run; the seed is in the name of a failure.
pub struct Random(pub u64);

impl Random {
    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }
}

/// The number that a variable of the environment has.
///
/// # Errors
/// What it has is no number.
pub fn number(variable: &str, default: u64) -> Result<u64> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable}={text} is no number")),
        Err(_) => Ok(default),
    }
}

/// Makes `GPUCR_RANDOM_DUMPS` dumps, `each` of them for one seed, from seed `GPUCR_RANDOM_SEED` on, two seeds at a time.
/// Gives the sum of what came of them. `filter` is what cargo-nextest needs to run this test.
///
/// # Errors
/// The first seed of each of the two that failed; the error says how to run it again.
pub fn at_random(
    default: u64,
    each: u64,
    filter: &str,
    dumped: impl Fn(u64) -> Result<u64> + Sync,
) -> Result<u64> {
    let first = number("GPUCR_RANDOM_SEED", 1)?;
    let seeds = number("GPUCR_RANDOM_DUMPS", default)?.div_ceil(each);
    let (next, done) = (AtomicU64::new(first), AtomicU64::new(0));
    let (found, start) = (AtomicU64::new(0), Instant::now());
    let worker = || -> Result<()> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + seeds {
                return Ok(());
            }
            let of_seed = dumped(seed).with_context(|| {
                // The others need not go on.
                next.store(first + seeds, Ordering::Relaxed);
                format!(
                    "seed {seed}; again: GPUCR_RANDOM_SEED={seed} GPUCR_RANDOM_DUMPS=1 cargo nextest run \
                     --workspace {filter}"
                )
            })?;
            found.fetch_add(of_seed, Ordering::Relaxed);
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(10) {
                eprintln!("{} dumps, {:.0} s", done * each, start.elapsed().as_secs_f64());
            }
        }
    };
    let ended: Vec<Result<()>> = std::thread::scope(|scope| {
        let workers = [scope.spawn(worker), scope.spawn(worker)];
        workers.map(|worker| worker.join().expect("no panic")).into()
    });
    let took = start.elapsed().as_secs_f64();
    println!("{} dumps with {seeds} seeds in {took:.0} s", done.into_inner() * each);
    ended.into_iter().collect::<Result<()>>().map(|()| found.into_inner())
}
