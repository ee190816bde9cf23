//! Values of options, as people write them.

use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use gpucr_core::store::Compression;

/// What can be a pid: the kernel's are positive numbers of 31 bits.
pub(crate) fn pids() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(i32::MAX))
}

/// So that clocks do not run over.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// A number of seconds, or a time with units as in `2m`.
///
/// # Errors
/// The text is no duration, or one of more than a hundred years.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let duration = match text.parse() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())?,
        Err(_) => humantime::parse_duration(text).map_err(|e| e.to_string())?,
    };
    if duration > LONGEST {
        return Err("it is longer than a hundred years".into());
    }
    Ok(duration)
}

/// A duration that is not zero and has a unit: who writes `--every 10` may mean minutes.
///
/// # Errors
/// As for [`interval`]; or the text is a mere number.
pub(crate) fn every(text: &str) -> Result<Duration, String> {
    if text.parse::<f64>().is_ok_and(|number| number > 0.0) {
        return Err(format!("a unit is expected, as in {text}s, {text}m or {text}h"));
    }
    interval(text)
}

/// A duration that is not zero.
///
/// # Errors
/// As for [`duration`]; or the duration is zero.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("an interval must be longer than zero".into()),
        interval => Ok(interval),
    }
}

/// A number of bytes, with units or without.
///
/// # Errors
/// The text is no size.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    text.parse::<bytesize::ByteSize>().map(|size| size.as_u64())
}

/// A word for an image.
///
/// # Errors
/// It is empty, too long, or has characters that a shell or a list would take for something else.
pub(crate) fn tag(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-:=+@".contains(c);
    match text.len() {
        1..=64 if text.chars().all(fits) => Ok(text.to_owned()),
        _ => Err("1 to 64 letters, digits and . _ - : = + @ are expected".into()),
    }
}

/// A number of bytes that is not zero, with units or without; or in hexadecimal digits behind `0x`.
///
/// # Errors
/// The text is no size, or it is zero.
pub(crate) fn length(text: &str) -> Result<u64, String> {
    let length = if text.starts_with("0x") { address(text)? } else { size(text)? };
    if length == 0 { Err("at least one byte is expected".into()) } else { Ok(length) }
}

/// An address, in hexadecimal digits behind `0x` or as a number.
///
/// # Errors
/// The text is no number of 64 bits.
pub(crate) fn address(text: &str) -> Result<u64, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16),
        _ => text.parse(),
    };
    number.map_err(|error| format!("{error}; an address is given as in 0x7f0000000000"))
}

/// How well chunks are compressed.
///
/// # Errors
/// The text is neither `none` nor a level from 1 to 19.
pub(crate) fn compression(text: &str) -> Result<Compression, String> {
    match text.parse::<i32>() {
        _ if text == "none" => Ok(Compression::None),
        Ok(level @ 1..=19) => Ok(Compression::Level(level)),
        _ => Err("`none` or a number from 1 to 19 is expected".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_levels() {
        assert_eq!(duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(duration("soon").is_err() && duration("-1").is_err());
        assert_eq!(interval("10"), Ok(Duration::from_secs(10)));
        assert_eq!(every("10m"), Ok(Duration::from_secs(600)));
        assert!(every("10").is_err_and(|why| why.contains("10s, 10m or 10h")));
        assert!(every("0").is_err() && every("0s").is_err() && every("-1").is_err());
        assert!(duration("99years").is_ok() && duration("1e18").is_err());
        assert_eq!((size("4096"), size("8 GiB")), (Ok(4096), Ok(8 << 30)));
        assert!(size("much").is_err() && size("-1").is_err());
        assert_eq!((address("0x7f00"), address("4096")), (Ok(0x7f00), Ok(4096)));
        assert!(address("7f00").is_err() && address("0x+1").is_err() && address("-1").is_err());
        assert_eq!((length("0x10"), length("2 KiB")), (Ok(16), Ok(2048)));
        assert!(length("0").is_err() && length("0x0").is_err());
        assert_eq!(compression("none"), Ok(Compression::None));
        assert_eq!(compression("19"), Ok(Compression::Level(19)));
        assert!(compression("0").is_err() && compression("20").is_err());
    }
}
