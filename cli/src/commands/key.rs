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
    /// Accept the image only if this is its identity, as printed by `gpucr inspect`
    #[arg(long, value_name = "ID", value_parser = gpucr_core::trust::parse_id)]
    pub(crate) expect_id: Option<[u8; 32]>,
    /// Accept the image only if it was signed with a key whose public key is in FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) trusted_key: Option<PathBuf>,
}

/// Make a key pair to sign images with
///
/// Writes a new private key to FILE, which only its owner can read, and the public key to FILE.pub. `gpucr dump
/// --sign FILE` signs an image with the private key; `gpucr restore --trusted-key FILE.pub` accepts only images
/// signed with it.
#[derive(clap::Args)]
#[command(after_long_help = "\
Keys are Ed25519 in PEM format, like those that `openssl genpkey -algorithm ed25519` makes. A file may hold \
several public keys, one after the other. If /etc/gpucr/trusted-keys exists, restore, warm and import accept \
only images signed with one of the keys in it, whatever other options say.\n\n\
Example:\n  gpucr key ~/.gpucr-key\n  gpucr dump --pid 4242 -o image --sign ~/.gpucr-key\n  \
gpucr restore --trusted-key ~/.gpucr-key.pub image")]
pub(crate) struct KeyArgs {
    /// The file for the private key; it must not exist yet
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
