//! How a stream to a port of a guest's is asked for at the unix socket that its VMM has for its vsock (docs/devices/vsock.md).

use std::io::{self, Read, Write};

/// Asks for a port on a stream that was connected to that socket; what follows belongs to whoever listens there. How long it waits is the
/// stream's own affair.
///
/// # Errors
/// The stream's; [`io::ErrorKind::ConnectionRefused`] where nobody listens.
pub fn ask_for_port(stream: &mut (impl Read + Write), port: u32) -> io::Result<()> {
    writeln!(stream, "CONNECT {port}")?;
    // The answer is one line, of which no byte more may be read.
    let mut byte = [0];
    while byte != *b"\n" {
        // A process that was stopped and goes on is interrupted in this, and reads on.
        stream.read_exact(&mut byte).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::ErrorKind::ConnectionRefused.into(),
            _ => error,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn no_byte_of_what_follows_the_answer_is_read_and_an_end_is_a_refusal() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let vmm = thread::spawn(move || {
            let mut asked = [0; 13];
            far.read_exact(&mut asked).unwrap();
            far.write_all(b"OK 1073741824\nhello").unwrap();
            asked
        });
        ask_for_port(&mut near, 1026).unwrap();
        let mut rest = String::new();
        near.read_to_string(&mut rest).unwrap();
        assert_eq!(
            (&vmm.join().unwrap()[..], rest.as_str()),
            (&b"CONNECT 1026\n"[..], "hello")
        );

        let (mut near, far) = UnixStream::pair().unwrap();
        let vmm = thread::spawn(move || (&far).read_exact(&mut [0; 13]));
        let refused = ask_for_port(&mut near, 1026).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        vmm.join().unwrap().unwrap();
    }
}
