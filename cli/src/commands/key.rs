//! `gpucr key`, and what the other commands are told of keys.

use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::trust::{PrivateKey, Trust, TrustError, TrustedKeys};

use crate::commands::{Outcome, io_error, say};

/// Which images are taken.
#[derive(clap::Args)]
#[command(next_help_heading = "Trust")]
pub(crate) struct TrustArgs {
    /// Take the image only if this is its identity, as `gpucr inspect` prints it
    #[arg(long, value_name = "ID", value_parser = gpucr_core::trust::parse_id)]
    pub(crate) expect_id: Option<[u8; 32]>,
    /// Take the image only if a public key in FILE has signed it
    #[arg(long, value_name = "FILE")]
    pub(crate) trusted_key: Option<PathBuf>,
}

/// Make a pair of keys to sign images with
///
/// Writes a new private key to FILE, which only its owner can read, and the public key to FILE.pub. `gpucr dump
/// --sign FILE` signs an image with the one; `gpucr restore --trusted-key FILE.pub` takes only images that were
/// signed so.
#[derive(clap::Args)]
#[command(after_long_help = "\
Keys are Ed25519 in PEM form, as `openssl genpkey -algorithm ed25519` makes them too. A file may hold several \
public keys, one after the other. If /etc/gpucr/trusted-keys is there, restore, warm and import take only images \
that one of the keys in it has signed, whatever else they are told.\n\n\
Example:\n  gpucr key ~/.gpucr-key\n  gpucr dump --pid 4242 -o image --sign ~/.gpucr-key\n  \
gpucr restore --trusted-key ~/.gpucr-key.pub image")]
pub(crate) struct KeyArgs {
    /// The file for the private key, which must not exist
    pub(crate) file: PathBuf,
}

pub(crate) fn run(args: &KeyArgs) -> Outcome {
    let key = PrivateKey::generate().map_err(io_error("cannot make a key"))?;
    let public = key.write(&args.file).map_err(Error::from)?;
    say!("private key  {}", args.file.display());
    say!("public key   {}  {}", public.display(), key.public_digits());
    Ok(ExitCode::SUCCESS)
}

/// Which images a command was told to take.
///
/// # Errors
/// A file of keys cannot be read, or holds something else.
pub(crate) fn trust(args: &TrustArgs) -> Result<Trust, Error> {
    let keys = args.trusted_key.as_deref().map(TrustedKeys::read).transpose()?;
    Ok(Trust::new(args.expect_id, keys))
}

/// Which images a command was told to take, with what the administrator of this host asks for.
///
/// # Errors
/// As for [`trust`]; or what the administrator asks for cannot be read.
pub(crate) fn trust_with_policy(args: &TrustArgs) -> Result<Trust, Error> {
    trust(args)?.with_policy().map_err(|error: TrustError| error.into())
}
