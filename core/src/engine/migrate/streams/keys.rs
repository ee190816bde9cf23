//! How the two ends of a stream know each other: the destination by a key of one migration alone, which the source was
//! told. There are no certificates (RFC 7250), and no names.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, ServerConfig,
    ServerConnection, SignatureScheme,
};

/// What comes before the 32 secret bytes of an Ed25519 key in PKCS #8 (RFC 8410).
const PKCS8: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// Speaks for the destination.
pub(super) struct Host {
    config: Arc<ServerConfig>,
    /// The public key, as the source has to be told it.
    pub(super) public: Vec<u8>,
}

impl Host {
    /// Has a key made of these random bytes.
    pub(super) fn new(secret: [u8; 32]) -> Result<Self, Error> {
        let provider = Arc::new(ring::default_provider());
        let key = any_eddsa_type(&PrivatePkcs8KeyDer::from([&PKCS8[..], &secret].concat()))?;
        let public = key.public_key().ok_or_else(|| Error::General("it has no key".into()))?;
        let public = public.as_ref().to_vec();
        let shown = vec![CertificateDer::from(public.clone())];
        let shown = Arc::new(CertifiedKey::new(shown, key));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(shown)));
        // Nobody comes back.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), public })
    }

    pub(super) fn connection(&self) -> Result<ServerConnection, Error> {
        ServerConnection::new(self.config.clone())
    }
}

/// Speaks for the source, with a destination that has this public key and with no one else.
pub(super) struct Guest(Arc<ClientConfig>);

impl Guest {
    pub(super) fn new(public: Vec<u8>) -> Result<Self, Error> {
        let provider = Arc::new(ring::default_provider());
        let pinned = Arc::new(Pinned { public, provider: provider.clone() });
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(pinned)
            .with_no_client_auth();
        config.enable_sni = false;
        Ok(Self(Arc::new(config)))
    }

    pub(super) fn connection(&self) -> Result<ClientConnection, Error> {
        let nobody = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        ClientConnection::new(self.0.clone(), nobody)
    }
}

/// Takes one key, and none else.
#[derive(Debug)]
struct Pinned {
    public: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if end_entity.as_ref() == self.public {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("nothing before TLS 1.3 is spoken".into()))
    }

    /// That the other side has the secret of that key.
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        let key = SubjectPublicKeyInfoDer::from(cert.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
