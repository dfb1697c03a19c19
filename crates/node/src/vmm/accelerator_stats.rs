//! What the server of a sandbox's accelerator tells of itself. That process runs code of its sandbox's programs, and is trusted with
//! nothing: it is asked for a bounded time, for a bounded number of bytes, and what passes is numbers and names of the known form.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use node_api::{AcceleratorMemory, AcceleratorStats, AcceleratorTime};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::accelerator_socket;

/// How long a server may take for its answer: it is one line, which a thread of its own writes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// The longest answer. A server counts 256 codes and calls each, and has 64 clients.
const MOST_BYTES: usize = 64 << 10;

/// The longest name of a call.
const MOST_NAME: usize = 64;

/// What it is counted under that has another name.
const OTHERS: &str = "other";

/// What a server writes (docs/accel-sharing.md, "What it tells"); keys that are not here are left out.
#[derive(Debug, Deserialize)]
struct Told {
    version: u32,
    #[serde(default)]
    restarts: u64,
    clients: Vec<IgnoredAny>,
    objects: BTreeMap<String, u64>,
    memory: AcceleratorMemory,
    time: Option<ToldTime>,
    errors: BTreeMap<i32, u64>,
    not_served: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
struct ToldTime {
    used: u64,
    held_up: u64,
    launches: u64,
    transfers: u64,
    in_flight: u64,
    is_shared: bool,
}

/// Asks the server that listens at `path`, for so long at most.
///
/// # Errors
/// Nobody listens, it does not answer in time, or what it says is no such thing.
pub(crate) fn ask(path: &Path, limit: Duration) -> io::Result<AcceleratorStats> {
    let mut bytes = Vec::new();
    let most = u64::try_from(MOST_BYTES).unwrap_or(u64::MAX);
    accelerator_socket::connect(path, limit)?
        .take(most + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() > MOST_BYTES {
        return Err(io::Error::other(format!("it tells more than {MOST_BYTES} bytes")));
    }
    read(&bytes)
}

/// What passes of an answer.
pub(crate) fn read(bytes: &[u8]) -> io::Result<AcceleratorStats> {
    let told: Told = serde_json::from_slice(bytes)
        .map_err(|error| io::Error::other(format!("what it tells is not what servers of this release do: {error}")))?;
    if told.version != 1 {
        return Err(io::Error::other(format!(
            "it tells in version {}; use one release on a host",
            told.version
        )));
    }
    let mut not_served: BTreeMap<String, u64> = BTreeMap::new();
    for (name, count) in told.not_served {
        let is_name = name.len() <= MOST_NAME && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let all = not_served.entry(if is_name { name } else { OTHERS.to_owned() });
        let all = all.or_default();
        *all = all.saturating_add(count);
    }
    let time = |time: ToldTime| AcceleratorTime {
        used_ns: time.used,
        held_up_ns: time.held_up,
        launches: time.launches,
        transfers: time.transfers,
        in_flight: time.in_flight,
        is_shared: time.is_shared,
    };
    Ok(AcceleratorStats {
        restarts: told.restarts,
        clients: u64::try_from(told.clients.len()).unwrap_or(u64::MAX),
        objects: told.objects.values().fold(0, |sum, count| sum.saturating_add(*count)),
        memory: told.memory,
        time: told.time.map(time),
        errors: told.errors,
        not_served,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Instant;

    use accel_server::{Backend, Server, TenantLimits};

    use super::*;

    /// Somebody in a server's place, and where.
    fn listener(directory: &tempfile::TempDir) -> (UnixListener, PathBuf) {
        let path = directory.path().join("accelerator");
        (UnixListener::bind(&path).unwrap(), path)
    }

    #[test]
    fn a_server_is_understood() {
        let directory = tempfile::tempdir().unwrap();
        let (listener, path) = listener(&directory);
        let limits = TenantLimits {
            memory: Some(1 << 20),
            measures_time: true,
            ..TenantLimits::default()
        };
        let settings = accel_transport::Settings {
            transports: vec![accel_transport::Transport::Bell],
            pairs: 1,
            records: 64,
            arena: 1 << 20,
            patience: Duration::from_secs(30),
            busy_poll: None,
        };
        let server = Arc::new(Server::with_limits(Backend::null(), settings, &limits).unwrap());
        server.tell_stats(listener, 2).unwrap();
        let stats = ask(&path, Duration::from_secs(30)).unwrap();
        let expected = AcceleratorStats {
            restarts: 2,
            memory: AcceleratorMemory {
                quota: Some(1 << 20),
                ..AcceleratorMemory::default()
            },
            time: Some(AcceleratorTime::default()),
            ..AcceleratorStats::default()
        };
        assert_eq!(stats, expected);
    }

    #[test]
    fn one_that_says_nothing_or_too_much_costs_no_more_than_that() {
        let directory = tempfile::tempdir().unwrap();
        let (listener, path) = listener(&directory);
        let limit = Duration::from_millis(50);
        let begin = Instant::now();
        assert_eq!(ask(&path, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begin.elapsed() >= limit);
        // Everybody who has asked before waits: nobody else can even connect.
        rustix::net::listen(&listener, 0).unwrap();
        assert_eq!(ask(&path, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(listener);
        let long = Duration::from_secs(30);
        assert_eq!(ask(&path, long).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        std::fs::remove_file(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let talks = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // Until whoever has asked hangs up.
            (0..)
                .find(|_| stream.write_all(&[b' '; 4096]).is_err())
                .unwrap_or_default()
                << 12
        });
        let error = ask(&path, Duration::from_secs(30)).unwrap_err();
        assert!(error.to_string().contains("more than 65536 bytes"), "{error}");
        // What was read, and what the socket has room for.
        assert!(talks.join().unwrap() < 1 << 20);
    }

    #[test]
    fn only_what_has_the_known_form_passes() {
        let line = |version: u32, not_served: &str| {
            format!(
                r#"{{"version":{version},"clients":[{{"transport":"bell"}},{{}}],"objects":{{"cl_mem":{max},"cl_event":7}},
                "memory":{{"used":1,"most":2,"quota":null,"refused":3}},"time":null,"errors":{{"-5":4}},
                "not_served":{{{not_served}}},"more":[1]}}"#,
                max = u64::MAX
            )
        };
        let names = format!(r#""clSVMAlloc":1,"a b":2,"\u001b[2J":3,"{}":4"#, "x".repeat(65));
        let stats = read(line(1, &names).as_bytes()).unwrap();
        assert_eq!((stats.clients, stats.objects, stats.restarts), (2, u64::MAX, 0));
        assert_eq!(stats.errors, BTreeMap::from([(-5, 4)]));
        let expected = BTreeMap::from([("clSVMAlloc".to_owned(), 1), (OTHERS.to_owned(), 9)]);
        assert_eq!(stats.not_served, expected);
        let refused = |line: &str| read(line.as_bytes()).unwrap_err().to_string();
        assert!(refused(&line(2, "")).contains("version 2"));
        assert!(refused("").contains("not what servers of this release do"));
        assert!(refused(&"[".repeat(60_000)).contains("not what servers"));
        assert!(refused(&line(1, r#""a":-1"#)).contains("not what servers"));
    }
}
