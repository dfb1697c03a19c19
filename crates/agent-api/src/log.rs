//! The log that a guest keeps of its sandbox's command: one line a record, written by the agent through a vsock port that
//! ends in a file, read by whoever wants to know. Knows neither who writes nor who reads.
//!
//! ```text
//!  1763710727.123456789 o F a whole line of standard output
//!  1763710727.123456789 e P a line of standard error, of which more is to come
//!  1763710727.123456789 x code 3
//! ```
//! Nanoseconds since 1970 by the guest's clock; `o` or `e`; `F` where a line feed ended it, `P` where it did not; the bytes
//! as they were. `x` is how the command ended. A log is bounded: its beginning may be missing in mid-line, and guests may
//! write what they like, so lines that are no record are passed over.

use crate::message::{ExitStatus, OutputStream};

/// The vsock port of the log.
pub const LOG_PORT: u32 = 1025;

/// One line of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// What it tells.
    pub what: What<'a>,
}

/// What a line of a log tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What<'a> {
    /// Output of the command.
    Output {
        /// Which of the two.
        stream: OutputStream,
        /// Without the line feed.
        bytes: &'a [u8],
        /// A line feed followed.
        ended: bool,
    },
    /// The command has ended.
    Exited(ExitStatus),
}

const NANOS: u64 = 1_000_000_000;

/// Appends the records of some output to `text`.
pub fn write_output(text: &mut Vec<u8>, time_ns: u64, stream: OutputStream, bytes: &[u8]) {
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let (line, ended) = match line.split_last() {
            Some((b'\n', line)) => (line, 'F'),
            _ => (line, 'P'),
        };
        let stream = match stream {
            OutputStream::Stdout => 'o',
            OutputStream::Stderr => 'e',
        };
        text.extend(format!("{}.{:09} {stream} {ended} ", time_ns / NANOS, time_ns % NANOS).as_bytes());
        text.extend(line);
        text.push(b'\n');
    }
}

/// Appends the record of the end to `text`.
pub fn write_exit(text: &mut Vec<u8>, time_ns: u64, status: ExitStatus) {
    let (kind, number) = match status {
        ExitStatus::Code(code) => ("code", code),
        ExitStatus::Signal(number) => ("signal", number),
    };
    text.extend(format!("{}.{:09} x {kind} {number}\n", time_ns / NANOS, time_ns % NANOS).as_bytes());
}

/// Reads one line, given without its line feed; `None` if it is no record.
pub fn read(line: &[u8]) -> Option<Record<'_>> {
    let (time, rest) = word(line)?;
    let time_ns = parse_time(time)?;
    let (kind, rest) = word(rest)?;
    let stream = match kind {
        b"o" => OutputStream::Stdout,
        b"e" => OutputStream::Stderr,
        b"x" => {
            return read_exit(rest).map(|status| Record {
                time_ns,
                what: What::Exited(status),
            });
        }
        _ => return None,
    };
    let (ended, bytes) = word(rest)?;
    let ended = match ended {
        b"F" => true,
        b"P" => false,
        _ => return None,
    };
    Some(Record {
        time_ns,
        what: What::Output { stream, bytes, ended },
    })
}

fn read_exit(rest: &[u8]) -> Option<ExitStatus> {
    let (kind, number) = word(rest)?;
    let number = std::str::from_utf8(number).ok()?.parse().ok()?;
    match kind {
        b"code" => Some(ExitStatus::Code(number)),
        b"signal" => Some(ExitStatus::Signal(number)),
        _ => None,
    }
}

fn parse_time(text: &[u8]) -> Option<u64> {
    let (seconds, nanos) = std::str::from_utf8(text).ok()?.split_once('.')?;
    if nanos.len() != 9 {
        return None;
    }
    let seconds: u64 = seconds.parse().ok()?;
    seconds.checked_mul(NANOS)?.checked_add(nanos.parse().ok()?)
}

/// The bytes up to the first blank, and those behind it.
fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|&byte| byte == b' ')?;
    Some((text.get(..at)?, text.get(at + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &[u8]) -> Vec<Record<'_>> {
        text.split(|&byte| byte == b'\n').filter_map(read).collect()
    }

    #[test]
    fn what_is_written_is_read_byte_by_byte() {
        let mut text = Vec::new();
        let out = b"one\n\ntwo \xff\0 o F\nthr";
        write_output(&mut text, 1_763_710_727_000_000_042, OutputStream::Stdout, out);
        write_output(&mut text, 7, OutputStream::Stderr, b"ee\n");
        write_exit(&mut text, 8, ExitStatus::Signal(9));
        assert!(text.starts_with(b"1763710727.000000042 o F one\n"));
        let found = records(&text);
        let mut bytes = Vec::new();
        for record in &found[..4] {
            let What::Output {
                stream,
                bytes: part,
                ended,
            } = record.what
            else {
                panic!("{record:?}")
            };
            assert_eq!(
                (stream, record.time_ns),
                (OutputStream::Stdout, 1_763_710_727_000_000_042)
            );
            bytes.extend(part);
            bytes.extend(ended.then_some(b'\n'));
        }
        assert_eq!(bytes, out);
        assert_eq!(
            found[4].what,
            What::Output {
                stream: OutputStream::Stderr,
                bytes: b"ee",
                ended: true
            }
        );
        assert_eq!(
            found[5],
            Record {
                time_ns: 8,
                what: What::Exited(ExitStatus::Signal(9))
            }
        );
        assert_eq!(found.len(), 6);
    }

    #[test]
    fn what_is_no_record_is_passed_over() {
        for line in [
            "",
            "1.000000000",
            "1.000000000 o",
            "1.000000000 o F",
            "1.000000000 q F x",
            "1.00000000 o F x",
            "1 o F x",
            "99999999999999999999.000000000 o F x",
            "18446744073.999999999 o F x",
            "1.000000000 x code 256",
            "1.000000000 x code",
            "1.000000000 x fell 3",
            "\0\0\0\0",
        ] {
            assert_eq!(read(line.as_bytes()), None, "{line:?}");
        }
        assert!(read(b"0.000000001 o P ").is_some(), "an empty piece");
    }
}
