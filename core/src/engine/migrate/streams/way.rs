//! What the two sides agree on for their streams.

use std::time::Duration;

/// Most streams of a migration.
pub const MOST: u32 = 64;
/// Bytes of a token.
pub(super) const TOKEN: usize = 32;
/// What the destination says to the right token.
pub(super) const WELCOME: u8 = 1;
/// How long whoever comes to a port may take until he has shown that he may.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);

/// How to come to the destination, as that says it over the link.
#[derive(Default)]
pub(in crate::engine::migrate) struct Way {
    pub(in crate::engine::migrate) port: u16,
    pub(in crate::engine::migrate) token: [u8; TOKEN],
    /// Its public key.
    pub(in crate::engine::migrate) key: Vec<u8>,
}
