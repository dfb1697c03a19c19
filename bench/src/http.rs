//! As much of HTTP/1.1 as a client needs that measures: one connection that is kept, requests with a body, answers whole, counted or as a
//! stream of Connect messages. Knows no endpoint.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// Nothing that is measured is silent for so long.
const SILENCE: Duration = Duration::from_secs(300);
/// The largest answer that is kept.
const MOST: u64 = 16 << 20;
/// A message of Connect: the last one has this flag.
const END: u8 = 2;

/// Servers close connections on which nothing is asked: the gateway does after 30 s. After so long another one is made.
const IDLE: Duration = Duration::from_secs(10);

/// A connection to a server, made again when it was idle for long.
pub(crate) struct Connection {
    address: SocketAddr,
    reader: BufReader<TcpStream>,
    asked: Instant,
}

/// What is asked.
pub(crate) struct Asked<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    /// Lines of the head besides.
    pub(crate) fields: &'a [(&'a str, &'a str)],
    pub(crate) length: u64,
}

fn connect(address: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect(address).with_context(|| format!("nobody serves at {address}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    Ok(BufReader::with_capacity(1 << 16, stream))
}

/// How long a body is.
enum Length {
    Known(u64),
    Chunked,
}

impl Connection {
    pub(crate) fn new(address: SocketAddr) -> Result<Self> {
        Ok(Self {
            address,
            reader: connect(address)?,
            asked: Instant::now(),
        })
    }

    /// Sends a request; the body of an answer of status 200 to 299.
    pub(crate) fn ask(&mut self, asked: &Asked<'_>, body: &[u8]) -> Result<Vec<u8>> {
        self.send(asked, [body].into_iter())?;
        let length = self.head(asked)?;
        self.body(&length)
    }

    /// Sends a request whose body comes in pieces; its answer.
    pub(crate) fn upload<'b>(&mut self, asked: &Asked<'_>, pieces: impl Iterator<Item = &'b [u8]>) -> Result<Vec<u8>> {
        self.send(asked, pieces)?;
        let length = self.head(asked)?;
        self.body(&length)
    }

    /// Sends a request; how many bytes the answer's body has, which are read and dropped.
    pub(crate) fn download(&mut self, asked: &Asked<'_>) -> Result<u64> {
        self.send(asked, std::iter::empty())?;
        match self.head(asked)? {
            Length::Known(length) => {
                let copied = std::io::copy(&mut (&mut self.reader).take(length), &mut std::io::sink())?;
                ensure!(copied == length, "the answer ends after {copied} of {length} bytes");
                Ok(copied)
            }
            Length::Chunked => {
                let mut all = 0;
                while let Some(length) = self.chunk()? {
                    all += std::io::copy(&mut (&mut self.reader).take(length), &mut std::io::sink())?;
                    self.line()?;
                }
                Ok(all)
            }
        }
    }

    /// Sends a message of Connect; the messages of the stream that answers, the last one included.
    pub(crate) fn call(&mut self, asked: &Asked<'_>, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut framed = vec![0];
        framed.extend(u32::try_from(message.len())?.to_be_bytes());
        framed.extend(message);
        let asked = Asked {
            length: u64::try_from(framed.len())?,
            ..*asked
        };
        let body = self.ask(&asked, &framed)?;
        let mut messages = Vec::new();
        let mut rest = body.as_slice();
        loop {
            let (head, after) = rest.split_at_checked(5).context("a stream without an end")?;
            let length = usize::try_from(u32::from_be_bytes([head[1], head[2], head[3], head[4]]))?;
            let (message, after) = after.split_at_checked(length).context("half a message")?;
            messages.push(message.to_vec());
            if head[0] & END != 0 {
                return Ok(messages);
            }
            rest = after;
        }
    }

    fn send<'b>(&mut self, asked: &Asked<'_>, pieces: impl Iterator<Item = &'b [u8]>) -> Result<()> {
        if self.asked.elapsed() > IDLE {
            self.reader = connect(self.address)?;
        }
        let mut head = format!("{} {} HTTP/1.1\r\nHost: bench\r\n", asked.method, asked.path);
        for (name, value) in asked.fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("Content-Length: {}\r\n\r\n", asked.length));
        let stream = self.reader.get_mut();
        stream.write_all(head.as_bytes())?;
        for piece in pieces {
            stream.write_all(piece)?;
        }
        Ok(())
    }

    fn head(&mut self, asked: &Asked<'_>) -> Result<Length> {
        let status = self.line()?;
        let mut length = Length::Known(0);
        loop {
            let line = self.line()?;
            let Some((name, value)) = line.split_once(':') else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = Length::Known(value.trim().parse()?),
                "transfer-encoding" => length = Length::Chunked,
                _ => (),
            }
        }
        if status.split(' ').nth(1).is_none_or(|code| !code.starts_with('2')) {
            let body = self.body(&length)?;
            let text = String::from_utf8_lossy(&body);
            bail!("{} {}: {status}: {text}", asked.method, asked.path);
        }
        Ok(length)
    }

    fn body(&mut self, length: &Length) -> Result<Vec<u8>> {
        self.asked = Instant::now();
        let mut body = Vec::new();
        match length {
            Length::Known(length) => {
                ensure!(*length <= MOST, "an answer of {length} bytes");
                (&mut self.reader).take(*length).read_to_end(&mut body)?;
            }
            Length::Chunked => {
                while let Some(length) = self.chunk()? {
                    ensure!(length <= MOST, "a piece of {length} bytes");
                    (&mut self.reader).take(length).read_to_end(&mut body)?;
                    self.line()?;
                }
            }
        }
        Ok(body)
    }

    /// The length of the next chunk; none at the end.
    fn chunk(&mut self) -> Result<Option<u64>> {
        let line = self.line()?;
        let length = u64::from_str_radix(line.trim(), 16).with_context(|| format!("no length: `{line}`"))?;
        if length == 0 {
            self.line()?;
            return Ok(None);
        }
        Ok(Some(length))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(
            self.reader.read_line(&mut line)? > 0,
            "the server has closed the connection"
        );
        Ok(line.trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const ASKED: Asked<'_> = Asked {
        method: "POST",
        path: "/x",
        fields: &[("A", "b")],
        length: 2,
    };

    /// A server that answers the next request so.
    fn server(answer: &'static [u8]) -> Connection {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let _read = stream.read(&mut asked).unwrap();
            stream.write_all(answer).unwrap();
        });
        Connection::new(address).unwrap()
    }

    #[test]
    fn bodies_are_read_whole_however_they_come() {
        let known = b"HTTP/1.1 201 Created\r\nContent-Length: 3\r\n\r\nabcX";
        assert_eq!(server(known).ask(&ASKED, b"{}").unwrap(), b"abc");
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
        assert_eq!(server(chunked).ask(&ASKED, b"{}").unwrap(), b"abc");
        assert_eq!(server(chunked).download(&ASKED).unwrap(), 3);
        let none = b"HTTP/1.1 204 No Content\r\n\r\n";
        assert_eq!(server(none).ask(&ASKED, b"{}").unwrap(), b"");
    }

    #[test]
    fn what_was_refused_is_told() {
        let refused = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone";
        let error = server(refused).ask(&ASKED, b"{}").unwrap_err().to_string();
        assert!(error.contains("404") && error.contains("gone"), "{error}");
    }

    #[test]
    fn a_stream_of_messages_has_an_end() {
        let stream = b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n\0\0\0\0\x02ab\x02\0\0\0\x02{}";
        assert_eq!(server(stream).call(&ASKED, b"{}").unwrap(), [b"ab", b"{}"]);
        let cut = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n\0\0\0\0\x02ab";
        assert!(server(cut).call(&ASKED, b"{}").is_err());
    }
}
