//! The first bytes of a connection: which protocol, which version, and a token where the server wants one. The client
//! speaks first; the token never travels from server to client. Knows no protocol by name.
//!
//! ```text
//!  client: | "BSLT" | oldest u16  | flags u8 (1 = token) | newer u8 | name, 24 bytes, zero-padded | token, 32 bytes |   64 bytes
//!  server: | "BSLT" | version u16 | status u16                      | name, 24 bytes, zero-padded |                     32 bytes
//! ```
//!
//! The client speaks the versions from `oldest` to `oldest + newer`, and the server answers with the newest one that both speak. A
//! side that knows one version only writes 0 for `newer` and does not look at it.

use std::fmt;
use std::hint::black_box;
use std::io::{Read, Write};

use crate::Error;
use crate::frame::fill;

const MAGIC: [u8; 4] = *b"BSLT";
const NAME_LEN: usize = 24;
const OFFER_LEN: usize = 64;
const REPLY_LEN: usize = 32;
const FLAG_TOKEN: u16 = 1;
/// How far the count of newer versions is shifted in the flags.
const NEWER_SHIFT: u32 = 8;

const STATUS_OK: u16 = 0;
const STATUS_PROTOCOL: u16 = 1;
const STATUS_VERSION: u16 = 2;
const STATUS_TOKEN: u16 = 3;

/// A protocol: its name, at most 24 bytes, and the versions of it that a side speaks, at most 256. Two sides speak the newest that
/// both know, or the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Name, for instance `basalt.agent`.
    pub name: &'static str,
    /// The oldest version that is still spoken.
    pub oldest: u16,
    /// The newest version.
    pub version: u16,
}

impl Protocol {
    /// How many versions newer than the oldest one are spoken.
    fn newer(self) -> u16 {
        self.version.saturating_sub(self.oldest).min(u16::from(u8::MAX))
    }

    /// The newest version that is spoken here and by a side that speaks those from `oldest` to `newest`.
    fn common(self, oldest: u16, newest: u16) -> Result<u16, Error> {
        let common = self.version.min(newest);
        match common >= self.oldest && common >= oldest {
            true => Ok(common),
            false => Err(self.wrong_version(newest)),
        }
    }

    fn wrong_version(self, theirs: u16) -> Error {
        Error::WrongVersion {
            name: self.name.to_owned(),
            oldest: self.oldest,
            ours: self.version,
            theirs,
        }
    }
}

/// A 256-bit secret that a client must know. Prints redacted.
#[derive(Clone)]
pub struct Token([u8; Token::LEN]);

impl Token {
    /// Bytes of a token.
    pub const LEN: usize = 32;

    /// A token of these bytes.
    pub fn new(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// A token out of its file: 64 hexadecimal digits and nothing else.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digit = |byte: &u8| {
            char::from(*byte)
                .to_digit(16)
                .and_then(|digit| u8::try_from(digit).ok())
        };
        let digits: Vec<u8> = text.as_bytes().iter().map(digit).collect::<Option<_>>()?;
        let (pairs, odd) = digits.as_chunks::<2>();
        let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
        let whole = bytes.try_into().ok().filter(|_| odd.is_empty());
        whole.map(Self)
    }

    /// Compares in constant time: how long it takes says nothing about where the first difference is.
    pub fn matches(&self, other: &[u8; Self::LEN]) -> bool {
        let mut difference = 0_u8;
        for (mine, theirs) in self.0.iter().zip(other) {
            difference = black_box(difference | (mine ^ theirs));
        }
        difference == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(redacted)")
    }
}

/// The client's half: offers `protocol` (with the token, if there is one) and waits for the server's answer, the version that both
/// speak from here on.
pub fn offer(stream: &mut (impl Read + Write), protocol: Protocol, token: Option<&Token>) -> Result<u16, Error> {
    send_offer(stream, protocol, token)?;
    await_answer(stream, protocol)
}

/// The client's first step alone. Frames may follow at once: a server that refuses the offer reads none of them.
pub fn send_offer(stream: &mut impl Write, protocol: Protocol, token: Option<&Token>) -> Result<(), Error> {
    let mut message = Vec::with_capacity(OFFER_LEN);
    message.extend_from_slice(&MAGIC);
    message.extend_from_slice(&protocol.oldest.to_le_bytes());
    let flags = if token.is_some() { FLAG_TOKEN } else { 0 } | protocol.newer() << NEWER_SHIFT;
    message.extend_from_slice(&flags.to_le_bytes());
    message.extend_from_slice(&name_field(protocol)?);
    message.extend_from_slice(&token.map_or([0; Token::LEN], |token| token.0));
    stream.write_all(&message)?;
    Ok(stream.flush()?)
}

/// The client's second step: waits for the server's answer, and fails unless it accepts; the version that both speak.
pub fn await_answer(stream: &mut impl Read, protocol: Protocol) -> Result<u16, Error> {
    let reply: [u8; REPLY_LEN] = receive(stream, "the handshake")?;
    let (theirs, status, name) = split_head(&reply)?;
    match status {
        STATUS_OK => {
            check_name(protocol, &name)?;
            protocol.common(theirs, theirs)
        }
        STATUS_PROTOCOL => Err(Error::WrongProtocol {
            ours: protocol.name.to_owned(),
            theirs: name,
        }),
        STATUS_VERSION => Err(protocol.wrong_version(theirs)),
        STATUS_TOKEN => Err(Error::TokenRefused),
        other => Err(Error::UnknownStatus(other)),
    }
}

/// The server's half: waits for an offer, answers it, and fails unless it was right; the version that both speak. Where `token` is
/// `None` any offered token is accepted. The caller bounds the time by a read timeout on the stream.
pub fn accept(stream: &mut (impl Read + Write), protocol: Protocol, token: Option<&Token>) -> Result<u16, Error> {
    let message: [u8; OFFER_LEN] = receive(stream, "the handshake")?;
    let (oldest, flags, name) = split_head(&message)?;
    let newest = oldest.saturating_add(flags >> NEWER_SHIFT);
    let mut offered = [0; Token::LEN];
    offered.copy_from_slice(message.get(REPLY_LEN..).unwrap_or_default());
    let has_token = flags & FLAG_TOKEN != 0;
    let verdict = check_name(protocol, &name)
        .and_then(|()| protocol.common(oldest, newest))
        .and_then(|common| match token {
            // Compared even if the flag says that there is none, so that both refusals take equally long.
            Some(token) if !(token.matches(&offered) & has_token) => Err(Error::TokenRefused),
            _ => Ok(common),
        });
    let status = match &verdict {
        Ok(_) => STATUS_OK,
        Err(Error::WrongProtocol { .. }) => STATUS_PROTOCOL,
        Err(Error::WrongVersion { .. }) => STATUS_VERSION,
        Err(_) => STATUS_TOKEN,
    };
    let mut reply = Vec::with_capacity(REPLY_LEN);
    reply.extend_from_slice(&MAGIC);
    reply.extend_from_slice(&verdict.as_ref().copied().unwrap_or(protocol.version).to_le_bytes());
    reply.extend_from_slice(&status.to_le_bytes());
    reply.extend_from_slice(&name_field(protocol)?);
    stream.write_all(&reply)?;
    stream.flush()?;
    verdict
}

fn receive<const N: usize>(stream: &mut impl Read, what: &'static str) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    match fill(stream, &mut bytes)? {
        got if got == N => Ok(bytes),
        got => Err(Error::Truncated { what, got, want: N }),
    }
}

/// The part that both messages share: version, status or flags, name.
fn split_head(bytes: &[u8]) -> Result<(u16, u16, String), Error> {
    let mut head = [0; REPLY_LEN];
    head.copy_from_slice(bytes.get(..REPLY_LEN).unwrap_or(&[0; REPLY_LEN]));
    let [m0, m1, m2, m3, v0, v1, s0, s1, name @ ..] = head;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(Error::NotBasalt([m0, m1, m2, m3]));
    }
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN);
    let name = String::from_utf8_lossy(name.get(..end).unwrap_or_default()).into_owned();
    Ok((u16::from_le_bytes([v0, v1]), u16::from_le_bytes([s0, s1]), name))
}

fn name_field(protocol: Protocol) -> Result<[u8; NAME_LEN], Error> {
    let mut field = [0; NAME_LEN];
    let length = protocol.name.len();
    let space = field.get_mut(..length).ok_or_else(|| Error::NameTooLong {
        name: protocol.name.to_owned(),
        length,
        limit: NAME_LEN,
    })?;
    space.copy_from_slice(protocol.name.as_bytes());
    Ok(field)
}

fn check_name(protocol: Protocol, theirs: &str) -> Result<(), Error> {
    if theirs == protocol.name {
        return Ok(());
    }
    Err(Error::WrongProtocol {
        ours: protocol.name.to_owned(),
        theirs: theirs.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    const V1: Protocol = Protocol {
        name: "basalt.test",
        oldest: 1,
        version: 1,
    };

    /// Runs both halves over a socket pair; the results of client and server.
    fn meet(
        client: (Protocol, Option<[u8; 32]>),
        server: (Protocol, Option<[u8; 32]>),
    ) -> (Result<u16, Error>, Result<u16, Error>) {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let far_end = thread::spawn(move || accept(&mut far, server.0, server.1.map(Token::new).as_ref()));
        let near_result = offer(&mut near, client.0, client.1.map(Token::new).as_ref());
        (near_result, far_end.join().unwrap())
    }

    #[test]
    fn equal_sides_agree_with_and_without_a_token() {
        for token in [None, Some([7; 32])] {
            let (near, far) = meet((V1, token), (V1, token));
            near.unwrap();
            far.unwrap();
        }
        // A server without a token does not mind one.
        let (near, far) = meet((V1, Some([7; 32])), (V1, None));
        near.unwrap();
        far.unwrap();
    }

    #[test]
    fn both_sides_name_the_other_version() {
        let v9 = Protocol {
            oldest: 9,
            version: 9,
            ..V1
        };
        let (near, far) = meet((V1, None), (v9, None));
        assert!(
            matches!(near, Err(Error::WrongVersion { ours: 1, theirs: 9, .. })),
            "{near:?}"
        );
        assert!(
            matches!(far, Err(Error::WrongVersion { ours: 9, theirs: 1, .. })),
            "{far:?}"
        );
        let text = near.unwrap_err().to_string();
        assert!(
            text.starts_with("the other side speaks version 9 of \"basalt.test\", this side version 1"),
            "{text}"
        );
    }

    /// Every pair of ranges up to version 5: both sides agree on the newest version that both have, or both refuse.
    #[test]
    fn sides_speak_the_newest_version_that_both_know() {
        let ranges = || (1..=5).flat_map(|oldest| (oldest..=5).map(move |version| Protocol { oldest, version, ..V1 }));
        for client in ranges() {
            for server in ranges() {
                let (near, far) = meet((client, None), (server, None));
                let common = (client.oldest.max(server.oldest)..=client.version.min(server.version)).max();
                match common {
                    Some(common) => assert_eq!((near.unwrap(), far.unwrap()), (common, common)),
                    None => {
                        assert!(
                            matches!(near, Err(Error::WrongVersion { .. })),
                            "{client:?} {server:?}: {near:?}"
                        );
                        assert!(
                            matches!(far, Err(Error::WrongVersion { .. })),
                            "{client:?} {server:?}: {far:?}"
                        );
                    }
                }
            }
        }
    }

    /// What sides of before there were ranges sent and understood: one version, and no count of newer ones.
    #[test]
    fn sides_of_one_version_are_understood() {
        let range = Protocol { version: 3, ..V1 };
        let mut sent = Vec::new();
        send_offer(&mut sent, range, Some(&Token::new([7; 32]))).unwrap();
        assert_eq!(sent[..8], *b"BSLT\x01\x00\x01\x02");
        let mut one = Vec::new();
        send_offer(&mut one, V1, None).unwrap();
        assert_eq!(one[..8], *b"BSLT\x01\x00\x00\x00");
        let (near, far) = meet((V1, None), (range, None));
        assert_eq!((near.unwrap(), far.unwrap()), (1, 1));
    }

    #[test]
    fn an_answer_outside_what_was_offered_is_refused() {
        let range = Protocol { version: 3, ..V1 };
        let mut answer = Vec::from(MAGIC);
        answer.extend_from_slice(&[4, 0, 0, 0]);
        answer.extend_from_slice(&name_field(V1).unwrap());
        let result = await_answer(&mut answer.as_slice(), range);
        assert!(
            matches!(result, Err(Error::WrongVersion { theirs: 4, .. })),
            "{result:?}"
        );
    }

    #[test]
    fn another_protocol_is_named() {
        let other = Protocol {
            name: "basalt.vmm",
            oldest: 1,
            version: 1,
        };
        let (near, far) = meet((V1, None), (other, None));
        assert!(
            matches!(near, Err(Error::WrongProtocol { ref theirs, .. }) if theirs == "basalt.vmm"),
            "{near:?}"
        );
        assert!(
            matches!(far, Err(Error::WrongProtocol { ref theirs, .. }) if theirs == "basalt.test"),
            "{far:?}"
        );
    }

    #[test]
    fn a_wrong_or_missing_token_is_refused() {
        // A difference anywhere counts: first, middle, last.
        let nearly = [0, 15, 31].map(|place| {
            let mut token = [7; 32];
            token[place] ^= 1;
            Some(token)
        });
        for token in [None, Some([0; 32])].into_iter().chain(nearly) {
            let (near, far) = meet((V1, token), (V1, Some([7; 32])));
            assert!(matches!(near, Err(Error::TokenRefused)), "{near:?}");
            assert!(matches!(far, Err(Error::TokenRefused)), "{far:?}");
        }
        // All zeros is what an offer without a token carries: it must not open a server whose token is all zeros.
        let (near, _) = meet((V1, None), (V1, Some([0; 32])));
        assert!(matches!(near, Err(Error::TokenRefused)), "{near:?}");
    }

    #[test]
    fn strangers_and_early_ends_are_told_apart() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.write_all(&[b'G'; 64]).unwrap();
        assert!(matches!(
            accept(&mut far, V1, None),
            Err(Error::NotBasalt([b'G', b'G', b'G', b'G']))
        ));

        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.write_all(b"BSLT\x01\x00").unwrap();
        drop(near);
        assert!(matches!(
            accept(&mut far, V1, None),
            Err(Error::Truncated { got: 6, want: 64, .. })
        ));
    }

    #[test]
    fn a_token_does_not_print_itself() {
        assert_eq!(format!("{:?}", Token::new([0x41; 32])), "Token(redacted)");
    }

    #[test]
    fn a_token_is_exactly_64_digits() {
        let digits: String = (0..32).map(|byte| format!("{byte:02x}")).collect();
        let token = Token::from_hex(&digits).unwrap();
        assert!(token.matches(&std::array::from_fn(|at| u8::try_from(at).unwrap())));
        for bad in [
            "",
            "0f",
            &"0f".repeat(33),
            &"0f".repeat(31),
            &"0g".repeat(32),
            &"+f".repeat(32),
            &"0".repeat(63),
            &"0".repeat(65),
            &"é".repeat(32),
        ] {
            assert!(Token::from_hex(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_name_that_does_not_fit_is_an_error() {
        let long = Protocol {
            name: "a-name-of-more-than-24-bytes",
            oldest: 1,
            version: 1,
        };
        let (mut near, _far) = UnixStream::pair().unwrap();
        assert!(matches!(
            offer(&mut near, long, None),
            Err(Error::NameTooLong {
                length: 28,
                limit: 24,
                ..
            })
        ));
    }
}
