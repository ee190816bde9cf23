//! How values are written in reports and names.

use std::time::Duration;

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A device's UUID as NVIDIA's tools and `CUDA_VISIBLE_DEVICES` write it: `GPU-01234567-89ab-…`.
pub fn device_uuid(uuid: &[u8; 16]) -> String {
    let hex = hex(uuid);
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{}", parts.join("-"))
}

/// A path as text, for reports: JSON has no place for bytes that are not UTF-8.
pub(crate) fn lossy<S: serde::Serializer>(
    path: &std::path::Path,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// Milliseconds, with fractions.
pub fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
