//! What programs in a sandbox learn of it by HTTP at 127.0.0.1:49983, where E2B's sandboxes have their daemon: its environment (`GET /envs`),
//! which those have not that ran before it was made of a template, and that it is there (`GET /health`). Everything else of that interface is
//! the gateway's. Knows no connection of a host's.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use agent_api::OsText;

use crate::{Error, STACK_SIZE, say};

/// The port of E2B's daemon.
const PORT: u16 = 49983;

/// How long whoever asks may take, and how much it may say.
const PATIENCE: Duration = Duration::from_secs(5);
const MOST: usize = 8 * 1024;

/// After a connection could not be taken.
const PAUSE: Duration = Duration::from_millis(100);

/// The sandbox's environment, as JSON, once it was told.
static ENVIRONMENT: Mutex<Option<Vec<u8>>> = Mutex::new(None);

/// Tells it from now on. The first time, somebody begins to listen, if nobody does.
pub(crate) fn tell(environment: &[OsText]) -> Result<(), Error> {
    let json = as_json(environment).map_err(Error::Malformed)?;
    let mut told = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
    if told.is_none()
        && let Err(error) = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).and_then(serve_in_thread)
    {
        // A program of the sandbox's may have the port: then that is what answers there.
        say(format_args!(
            "programs are not told the sandbox's environment at port {PORT}: {error}"
        ));
        return Ok(());
    }
    *told = Some(json);
    Ok(())
}

fn as_json(environment: &[OsText]) -> Result<Vec<u8>, serde_json::Error> {
    let variables: BTreeMap<String, String> = (environment.iter())
        .filter_map(|entry| {
            let text = entry.to_string();
            let (name, value) = text.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        })
        .collect();
    serde_json::to_vec(&variables)
}

fn serve_in_thread(listener: TcpListener) -> io::Result<()> {
    let serving = thread::Builder::new().name("envs".to_owned()).stack_size(STACK_SIZE);
    serving.spawn(move || serve(&listener)).map(drop)
}

fn serve(listener: &TcpListener) {
    loop {
        match listener.accept() {
            // Whoever leaves early wanted nothing.
            Ok((stream, _)) => drop(answer(stream)),
            Err(error) => {
                say(format_args!("a program's question was not taken: {error}"));
                thread::sleep(PAUSE);
            }
        }
    }
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut head = Vec::with_capacity(1024);
    let mut bytes = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            got => head.extend_from_slice(bytes.get(..got).unwrap_or_default()),
        }
        if head.len() > MOST {
            return Ok(());
        }
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let told = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match line.split(|byte| *byte == b' ').collect::<Vec<_>>().as_slice() {
        [b"GET", b"/envs", ..] => respond(&mut stream, "200 OK", &told.unwrap_or_default()),
        [b"GET", b"/health", ..] => respond(&mut stream, "204 No Content", b""),
        _ => respond(&mut stream, "404 Not Found", b""),
    }
}

fn respond(stream: &mut TcpStream, status: &str, body: &[u8]) -> io::Result<()> {
    let kind = if body.is_empty() {
        ""
    } else {
        "Content-Type: application/json\r\n"
    };
    let length = if status.starts_with("204") {
        String::new()
    } else {
        format!("Content-Length: {}\r\n", body.len())
    };
    let head = format!("HTTP/1.1 {status}\r\n{kind}{length}Connection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_told_as_it_is_now() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        serve_in_thread(listener).unwrap();
        let ask = |request: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).unwrap();
            reply
        };
        let tell = |environment: &[OsText]| *ENVIRONMENT.lock().unwrap() = Some(as_json(environment).unwrap());
        tell(&["A=b c".into(), "EMPTY=".into(), "no variable".into()]);
        let reply = ask("GET /envs HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(
            reply.starts_with("HTTP/1.1 200 OK\r\n") && reply.ends_with(r#"{"A":"b c","EMPTY":""}"#),
            "{reply}"
        );
        tell(&["A=d".into()]);
        assert!(ask("GET /envs HTTP/1.0\r\n\r\n").ends_with(r#"{"A":"d"}"#));
        assert!(ask("GET /health HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 204 "));
        for request in ["POST /envs HTTP/1.1\r\n\r\n", "GET /files HTTP/1.1\r\n\r\n", "\r\n\r\n"] {
            assert!(ask(request).starts_with("HTTP/1.1 404 "), "{request}");
        }
    }
}
