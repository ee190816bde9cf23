//! Whose images are taken: a restore runs the program that is in an image, as the user that it ran as, so it is for
//! the user who restores to say which images these are.
//!
//! The identity of an image is the hash of its manifest, which names every chunk by its own hash. So to know an
//! image by its identity is to know all of it, and a signature of the identity is one of the image. Signatures are
//! Ed25519 (RFC 8032) over [`CONTEXT`] and the 32 bytes of the identity; they lie beside the manifest, in the
//! file [`SIGNATURES`], a line each. Keys are PEM files as `openssl genpkey -algorithm ed25519` writes them: PKCS #8
//! (RFC 8410) and SubjectPublicKeyInfo.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ed25519_dalek::ed25519::signature::Signer;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{
    DecodePrivateKey, DecodePublicKey, EncodePrivateKey, EncodePublicKey, KeypairBytes,
};
use ed25519_dalek::{Signature, SigningKey, VerifyingKey};

use crate::base::foreign::Foreign;
use crate::image::error::ImageError;
pub use crate::image::error::TrustError;
use crate::image::manifest::Manifest;

/// If this file is there, restores, warm images and imports of this host take only images that one of the public
/// keys in it has signed.
pub const POLICY: &str = "/etc/gpucr/trusted-keys";
/// The file of an image that has its signatures.
pub(crate) const SIGNATURES: &str = "signatures";
/// What is signed begins with this, so that no signature made for something else fits.
const CONTEXT: &[u8] = b"gpucr image identity v1\0";
/// The same for what a migration offers.
const OFFER_CONTEXT: &[u8] = b"gpucr migration offer v1\0";
/// What begins a line of [`SIGNATURES`]; key and signature follow in hexadecimal digits.
const ALGORITHM: &str = "ed25519";
/// Most bytes that a file of keys or signatures may have.
pub(crate) const LARGEST: u64 = 64 << 10;
/// A PEM block of a public key is between these two.
const PEM: (&str, &str) = ("-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----");
/// A key to sign images with.
pub struct PrivateKey(SigningKey);

impl std::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrivateKey({})", self.public_digits())
    }
}

impl PrivateKey {
    /// Makes a new one.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn generate() -> io::Result<Self> {
        let mut secret = [0; 32];
        let mut filled = 0;
        while filled < secret.len() {
            let flags = rustix::rand::GetRandomFlags::empty();
            filled += rustix::rand::getrandom(&mut secret[filled..], flags)?;
        }
        Ok(Self(SigningKey::from_bytes(&secret)))
    }

    /// Reads one from a file that nobody but its owner can read.
    ///
    /// # Errors
    /// The file cannot be read, others can read it too, or it holds no such key.
    pub fn read(path: &Path) -> Result<Self, TrustError> {
        let failed = |source| TrustError::Read { path: path.to_owned(), source };
        let mut file =
            File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
            return Err(TrustError::OpenKey { path: path.to_owned() });
        }
        let mut text = String::new();
        (&mut file).take(LARGEST).read_to_string(&mut text).map_err(failed)?;
        let key = SigningKey::from_pkcs8_pem(&text);
        key.map(Self).map_err(|_| TrustError::NoPrivateKey { path: path.to_owned() })
    }

    /// Writes it to the new file `path`, for its owner alone, and its public key to `path.pub`.
    ///
    /// # Errors
    /// One of the files is there already, or cannot be written. What was written stays.
    pub fn write(&self, path: &Path) -> Result<PathBuf, TrustError> {
        // The first version of PKCS #8, without the public key: OpenSSL reads no other.
        let bytes = KeypairBytes { secret_key: self.0.to_bytes(), public_key: None };
        let unencodable = |path: &Path| TrustError::Write {
            path: path.to_owned(),
            source: io::ErrorKind::InvalidData.into(),
        };
        let private = bytes.to_pkcs8_pem(LineEnding::LF).map_err(|_| unencodable(path))?;
        let public = self.0.verifying_key().to_public_key_pem(LineEnding::LF);
        let mut beside = path.as_os_str().to_owned();
        beside.push(".pub");
        let beside = PathBuf::from(beside);
        let public = public.map_err(|_| unencodable(&beside))?;
        for (path, text, mode) in [(path, private.as_str(), 0o600), (&beside, &public, 0o644)] {
            let file = File::options().write(true).create_new(true).mode(mode).open(path);
            file.and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .map_err(|source| TrustError::Write { path: path.to_owned(), source })?;
        }
        Ok(beside)
    }

    /// The public key in hexadecimal digits, by which signatures name it.
    pub fn public_digits(&self) -> String {
        crate::base::format::hex(self.0.verifying_key().as_bytes())
    }

    /// The line for [`SIGNATURES`] that says that this key vouches for the image of this identity.
    pub(crate) fn sign(&self, id: &[u8; 32]) -> String {
        self.sign_as(CONTEXT, id)
    }

    /// The same line for the hash of what a migration offers.
    pub(crate) fn sign_offer(&self, hash: &[u8; 32]) -> String {
        self.sign_as(OFFER_CONTEXT, hash)
    }

    fn sign_as(&self, context: &[u8], what: &[u8; 32]) -> String {
        let signature = self.0.sign(&[context, what].concat());
        format!(
            "{ALGORITHM} {} {}\n",
            self.public_digits(),
            crate::base::format::hex(&signature.to_bytes())
        )
    }
}

/// Public keys, and the file that they are from.
#[derive(Debug, Clone)]
pub struct TrustedKeys {
    path: PathBuf,
    keys: Vec<VerifyingKey>,
}

impl TrustedKeys {
    /// Reads all public keys of a file; what is not between the lines of a PEM block is passed over.
    ///
    /// # Errors
    /// The file cannot be read, holds no key, or something between such lines is none.
    pub fn read(path: &Path) -> Result<Self, TrustError> {
        let bytes = Foreign::open(path).and_then(|file| file.bytes(LARGEST));
        let bytes = bytes.map_err(|source| TrustError::Read { path: path.to_owned(), source })?;
        let none = || TrustError::NoPublicKey { path: path.to_owned() };
        let text = String::from_utf8(bytes).map_err(|_| none())?;
        let mut keys = Vec::new();
        for block in text.split(PEM.0).skip(1) {
            let (body, _) = block.split_once(PEM.1).ok_or_else(none)?;
            let key = VerifyingKey::from_public_key_pem(&[PEM.0, body, PEM.1].concat());
            keys.push(key.map_err(|_| none())?);
        }
        if keys.is_empty() { Err(none()) } else { Ok(Self { path: path.to_owned(), keys }) }
    }

    /// Checks that one of the keys has signed this, in that context.
    fn check(&self, context: &[u8], what: &[u8; 32], signatures: &str) -> Result<(), TrustError> {
        if signatures.is_empty() {
            return Err(TrustError::Unsigned { by: self.path.clone() });
        }
        let mut signers = Vec::new();
        for line in signatures.lines() {
            let (key, signature) = parse(line)?;
            let message = [context, what].concat();
            let key = self.keys.iter().find(|known| *known.as_bytes() == key).ok_or(key);
            match key {
                Ok(key) if key.verify_strict(&message, &signature).is_ok() => return Ok(()),
                Ok(key) => {
                    let what = format!(
                        "that of {} does not fit",
                        crate::base::format::hex(key.as_bytes())
                    );
                    return Err(TrustError::BadSignatures(what));
                }
                Err(stranger) => signers.push(crate::base::format::hex(&stranger)),
            }
        }
        Err(TrustError::Untrusted { by: self.path.clone(), signers })
    }
}

/// The key and the signature in a line of [`SIGNATURES`].
fn parse(line: &str) -> Result<([u8; 32], Signature), TrustError> {
    let bad = || TrustError::BadSignatures("a line is not as gpucr writes it".into());
    let mut words = line.split(' ');
    let (Some(ALGORITHM), Some(key), Some(signature), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(bad());
    };
    let key = digits::<32>(key).ok_or_else(bad)?;
    let signature = digits::<64>(signature).ok_or_else(bad)?;
    Ok((key, Signature::from_bytes(&signature)))
}

/// Reads `2 * N` hexadecimal digits.
fn digits<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (number, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * number..2 * number + 2], 16).ok()?;
    }
    Some(bytes)
}

/// An identity as the user gives it: 64 hexadecimal digits.
///
/// # Errors
/// The text is no identity.
pub fn parse_id(text: &str) -> Result<[u8; 32], String> {
    digits(text).ok_or_else(|| "an identity has 64 hexadecimal digits".to_owned())
}

/// Which images are taken.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    expected: Option<[u8; 32]>,
    /// One key of each of these has to have signed the image.
    signed_by: Vec<TrustedKeys>,
}

impl Trust {
    /// Any image, or that with the identity `expected` only; if there are `keys`, one that they have signed.
    pub fn new(expected: Option<[u8; 32]>, keys: Option<TrustedKeys>) -> Self {
        Self { expected, signed_by: keys.into_iter().collect() }
    }

    /// Adds what the administrator of this host [asks for](POLICY).
    ///
    /// # Errors
    /// The administrator's file is there and cannot be read.
    pub fn with_policy(mut self) -> Result<Self, TrustError> {
        match TrustedKeys::read(Path::new(POLICY)) {
            Ok(keys) => self.signed_by.push(keys),
            Err(TrustError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(self)
    }

    /// Checks the image of identity `id`, given what its [`SIGNATURES`] hold.
    ///
    /// # Errors
    /// The image is not taken.
    pub fn check(&self, id: &[u8; 32], signatures: &str) -> Result<(), TrustError> {
        if let Some(expected) = &self.expected
            && expected != id
        {
            let (found, expected) =
                (crate::base::format::hex(id), crate::base::format::hex(expected));
            return Err(TrustError::OtherImage { found, expected });
        }
        self.signed_by.iter().try_for_each(|keys| keys.check(CONTEXT, id, signatures))
    }

    /// Checks what a migration offers, of which the image will be known only when all of it is here.
    ///
    /// # Errors
    /// An image that nobody else has signed is not taken.
    pub(crate) fn check_offer(&self, hash: &[u8; 32], signatures: &str) -> Result<(), TrustError> {
        self.signed_by.iter().try_for_each(|keys| keys.check(OFFER_CONTEXT, hash, signatures))
    }

    /// Reads the manifest of the image in the directory `dir`, if it is taken.
    ///
    /// # Errors
    /// The image is not taken, or its manifest cannot be read.
    pub fn manifest(&self, dir: &Path) -> Result<Manifest, ImageError> {
        let (manifest, id) = Manifest::read_with_id(dir)?;
        self.check_image(dir, &id)?;
        Ok(manifest)
    }

    /// Checks the image in the directory `dir`, whose manifest has the identity `id`.
    ///
    /// # Errors
    /// The image is not taken, or its signatures cannot be read.
    pub fn check_image(&self, dir: &Path, id: &[u8; 32]) -> Result<(), TrustError> {
        let signatures = if self.signed_by.is_empty() { String::new() } else { signatures(dir)? };
        self.check(id, &signatures)
    }
}

/// What the image in the directory `dir` has of signatures; nothing if it has none.
///
/// # Errors
/// The signatures cannot be read, or are too many.
pub(crate) fn signatures(dir: &Path) -> Result<String, TrustError> {
    let path = dir.join(SIGNATURES);
    match Foreign::open(&path).and_then(|file| file.bytes(LARGEST)) {
        Ok(bytes) => as_text(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(TrustError::Read { path, source }),
    }
}

/// What was read of signatures.
pub(crate) fn as_text(bytes: Vec<u8>) -> Result<String, TrustError> {
    String::from_utf8(bytes).map_err(|_| TrustError::BadSignatures("they are not text".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key, and its public half as a file.
    fn key(dir: &Path, name: &str) -> (PrivateKey, TrustedKeys) {
        let path = dir.join(name);
        let public = PrivateKey::generate().unwrap().write(&path).unwrap();
        (PrivateKey::read(&path).unwrap(), TrustedKeys::read(&public).unwrap())
    }

    #[test]
    fn an_image_is_taken_if_a_trusted_key_has_signed_it() {
        let dir = tempfile::tempdir().unwrap();
        let ((one, one_public), (other, _)) = (key(dir.path(), "one"), key(dir.path(), "other"));
        let (id, another) = ([7; 32], [8; 32]);
        let trust = Trust::new(None, Some(one_public));
        trust.check(&id, &one.sign(&id)).unwrap();
        trust.check(&id, &(other.sign(&id) + &one.sign(&id))).unwrap();
        assert!(matches!(trust.check(&id, ""), Err(TrustError::Unsigned { .. })));
        let strange = trust.check(&id, &other.sign(&id));
        let Err(TrustError::Untrusted { signers, .. }) = strange else { panic!("{strange:?}") };
        assert_eq!(signers, [other.public_digits()]);
        trust.check_offer(&id, &one.sign_offer(&id)).unwrap();
        assert!(matches!(trust.check_offer(&id, ""), Err(TrustError::Unsigned { .. })));
        assert!(trust.check_offer(&id, &one.sign(&id)).is_err(), "an image is no offer");
        // A signature of another image, one of an offer, and one under another's name.
        for forged in [
            one.sign(&another),
            one.sign_offer(&id),
            other.sign(&id).replace(&other.public_digits(), &one.public_digits()),
        ] {
            let result = trust.check(&id, &forged);
            assert!(matches!(result, Err(TrustError::BadSignatures(_))), "{result:?}");
        }
        for bad in ["x", "ed25519 0 0", "ed25519  ", "\n", "ed25519 é é"] {
            let result = trust.check(&id, bad);
            assert!(matches!(result, Err(TrustError::BadSignatures(_))), "{bad}: {result:?}");
        }
    }

    #[test]
    fn an_image_is_taken_if_it_is_the_expected_one() {
        let trust = Trust::new(Some([7; 32]), None);
        trust.check(&[7; 32], "").unwrap();
        assert!(matches!(trust.check(&[8; 32], ""), Err(TrustError::OtherImage { .. })));
        assert_eq!(parse_id(&"07".repeat(32)), Ok([7; 32]));
        assert!(parse_id("07").is_err() && parse_id(&"é".repeat(32)).is_err());
        Trust::default().check(&[1; 32], "").unwrap();
    }

    #[test]
    fn a_key_that_others_can_read_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        PrivateKey::generate().unwrap().write(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(PrivateKey::read(&path), Err(TrustError::OpenKey { .. })));
        // Nothing is overwritten.
        let again = PrivateKey::generate().unwrap().write(&path);
        assert!(matches!(again, Err(TrustError::Write { .. })));
    }

    #[test]
    fn a_file_without_keys_trusts_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        for text in ["", "nothing", PEM.0, &[PEM.0, "\nAAAA\n", PEM.1].concat()] {
            std::fs::write(&path, text).unwrap();
            let read = TrustedKeys::read(&path);
            assert!(matches!(read, Err(TrustError::NoPublicKey { .. })), "{text}: {read:?}");
        }
    }

    #[test]
    fn keys_have_the_usual_form() {
        // The examples of RFC 8410, section 10.
        let dir = tempfile::tempdir().unwrap();
        let (private, public) = (dir.path().join("key"), dir.path().join("key.pub"));
        let text = "-----BEGIN PRIVATE KEY-----\n\
                    MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n\
                    -----END PRIVATE KEY-----\n";
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(&private).unwrap();
        std::fs::write(&private, text).unwrap();
        let text = "-----BEGIN PUBLIC KEY-----\n\
                    MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n\
                    -----END PUBLIC KEY-----\n";
        std::fs::write(&public, text).unwrap();
        let trust = Trust::new(None, Some(TrustedKeys::read(&public).unwrap()));
        trust.check(&[1; 32], &PrivateKey::read(&private).unwrap().sign(&[1; 32])).unwrap();
    }
}
