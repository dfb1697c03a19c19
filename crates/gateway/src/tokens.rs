//! The tokens by which a sandbox is reached, or an upload is made: an HMAC of its id, so that nothing is kept of them and every gateway with the same secret
//! takes them. Knows no request.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::Error;

/// The secret's file in the state directory.
const FILE: &str = "token.secret";

/// Bytes of the secret.
const SECRET: usize = 32;

/// It is part of what is signed: another one makes all tokens of before worthless.
const EPOCH: u64 = 1;

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Processes and files.
    Envd,
    /// Ports of a sandbox whose traffic is not public.
    Traffic,
    /// An upload for builds, until some time.
    Upload,
    /// The files of a volume.
    Volume,
}

impl TokenKind {
    fn name(self) -> &'static str {
        match self {
            Self::Envd => "envd",
            Self::Traffic => "traffic",
            Self::Upload => "upload",
            Self::Volume => "volume",
        }
    }
}

/// Makes and checks tokens.
#[derive(Clone)]
pub struct Tokens {
    secret: [u8; SECRET],
    epoch: u64,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens")
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl Tokens {
    /// With the secret in this directory, which is made if there is none.
    ///
    /// # Errors
    /// It cannot be read or made, or others can read it.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(FILE);
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        match made {
            Ok(file) => write_secret(file, directory).map_err(Error::host("make the secret of tokens"))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (),
            Err(error) => return Err(Error::host("make the secret of tokens")(error)),
        }
        let secret = read_secret(&path).map_err(Error::host("read the secret of tokens"))?;
        Ok(Self { secret, epoch: EPOCH })
    }

    /// The token of a sandbox.
    pub(crate) fn token(&self, kind: TokenKind, id: &str) -> String {
        hex::encode(self.mac(kind, id).finalize().into_bytes())
    }

    /// Whether this is it; it takes equally long wherever the first difference is.
    pub(crate) fn is_token(&self, kind: TokenKind, id: &str, shown: &[u8]) -> bool {
        let Ok(bytes) = hex::decode(shown) else {
            return false;
        };
        self.mac(kind, id).verify_slice(&bytes).is_ok()
    }

    fn mac(&self, kind: TokenKind, id: &str) -> Hmac<Sha256> {
        let text = format!("{}|{id}|{}", kind.name(), self.epoch);
        // A key of HMAC may have any length; its own constructor for that says so by a `Result` that is never an error.
        let mut mac = <Hmac<Sha256> as Mac>::new(&self.secret_block().into());
        mac.update(text.as_bytes());
        mac
    }

    /// The secret as a whole block of SHA-256, filled with zeroes as HMAC does it (RFC 2104).
    fn secret_block(&self) -> [u8; 64] {
        let mut block = [0; 64];
        let (start, _) = block.split_at_mut(SECRET);
        start.copy_from_slice(&self.secret);
        block
    }
}

fn write_secret(mut file: File, directory: &Path) -> io::Result<()> {
    let mut secret = [0; SECRET];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
    file.write_all(&secret)?;
    file.sync_all()?;
    File::open(directory)?.sync_all()
}

fn read_secret(path: &Path) -> io::Result<[u8; SECRET]> {
    let mut file = File::open(path)?;
    let mode = file.metadata()?.mode() & 0o7777;
    if mode & 0o077 != 0 {
        let path = path.display();
        return Err(io::Error::other(format!(
            "{path} has the mode {mode:o}, and is for this user alone: chmod 600 {path}"
        )));
    }
    let mut secret = [0; SECRET];
    file.read_exact(&mut secret).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "{} has no {SECRET} bytes: remove it, which makes all tokens worthless",
                path.display()
            ),
        )
    })?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_token_is_of_one_sandbox_one_kind_and_one_secret() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = Tokens::open(directory.path()).unwrap();
        let token = tokens.token(TokenKind::Envd, "0123456789ab");
        assert_eq!(token.len(), 64);
        assert!(tokens.is_token(TokenKind::Envd, "0123456789ab", token.as_bytes()));
        assert!(!tokens.is_token(TokenKind::Traffic, "0123456789ab", token.as_bytes()));
        assert!(!tokens.is_token(TokenKind::Envd, "0123456789ac", token.as_bytes()));
        for other in ["", "zz", &token[..62], &format!("{token}00")] {
            assert!(
                !tokens.is_token(TokenKind::Envd, "0123456789ab", other.as_bytes()),
                "{other}"
            );
        }
        let again = Tokens::open(directory.path()).unwrap();
        assert_eq!(again.token(TokenKind::Envd, "0123456789ab"), token);
        let other = Tokens::open(tempfile::tempdir().unwrap().path()).unwrap();
        assert_ne!(other.token(TokenKind::Envd, "0123456789ab"), token);
        let later = Tokens { epoch: 2, ..tokens };
        assert!(!later.is_token(TokenKind::Envd, "0123456789ab", token.as_bytes()));
    }

    #[test]
    fn the_mac_is_hmac_as_others_compute_it() {
        // printf 'envd|0123456789ab|1' | openssl dgst -sha256 -mac HMAC -macopt hexkey:0707... (32 bytes)
        let tokens = Tokens {
            secret: [7; SECRET],
            epoch: 1,
        };
        assert_eq!(
            tokens.token(TokenKind::Envd, "0123456789ab"),
            "ba36dc296218756c30b6c74a7f701002abfdaf32a22e6079a52347b8e6fd4962"
        );
    }

    #[test]
    fn a_secret_that_others_can_read_is_none() {
        let directory = tempfile::tempdir().unwrap();
        Tokens::open(directory.path()).unwrap();
        let path = directory.path().join(FILE);
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = Tokens::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains("644") && error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, b"short").unwrap();
        let error = Tokens::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains("32 bytes"), "{error}");
    }
}
