//! A port of this machine that leads to a port of the lab's loopback interface: through the agent, so that what listens there need not listen
//! to anybody else. Lasts as long as this process. Knows nothing of what is sent.

use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::remote;
use crate::state::Lab;

/// Connections at a time: the lab's agent takes 256 from everybody.
const MOST: usize = 200;

/// After a connection could not be taken, as with too many descriptors open.
const PAUSE: Duration = Duration::from_millis(100);

/// A port of this machine, 0 for any, and one of the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) here: u16,
    pub(crate) lab: u16,
}

impl std::str::FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (here, lab) = text.split_once(':')?;
            let lab = lab.parse().ok().filter(|port| *port != 0)?;
            Some(Self {
                here: here.parse().ok()?,
                lab,
            })
        };
        read()
            .ok_or_else(|| format!("`{text}` is not PORT:PORT, a port of this machine (0 for any) and one of the lab"))
    }
}

/// Serves connections until it is killed; `ready` is told the port of this machine.
pub(crate) fn serve(lab: Lab, ports: Ports, ready: impl FnOnce(u16) -> Result<()>) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports.here))
        .with_context(|| format!("port {} of this machine cannot be listened on", ports.here))?;
    let (lab, open) = (Arc::new(lab), Arc::new(AtomicUsize::new(0)));
    ready(listener.local_addr()?.port())?;
    loop {
        let near = match listener.accept() {
            Ok((near, _)) => near,
            Err(error) => {
                eprintln!("basalt-lab: a connection was not taken: {error}");
                thread::sleep(PAUSE);
                continue;
            }
        };
        if open.load(Ordering::SeqCst) >= MOST {
            eprintln!("basalt-lab: a connection was closed: {MOST} are open already");
            continue;
        }
        open.fetch_add(1, Ordering::SeqCst);
        let (lab, open) = (Arc::clone(&lab), Arc::clone(&open));
        thread::spawn(move || {
            if let Err(error) = carry(&near, &lab, ports.lab) {
                eprintln!("basalt-lab: {error:#}");
            }
            open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Both directions of one connection; each end is passed on.
fn carry(near: &TcpStream, lab: &Lab, port: u16) -> Result<()> {
    near.set_nodelay(true)?;
    let far = remote::connect(lab)?.connect_port(port)?;
    thread::scope(|scope| {
        scope.spawn(|| pass_on(near, &far));
        pass_on(&far, near);
    });
    Ok(())
}

fn pass_on(mut from: &TcpStream, mut to: &TcpStream) {
    // Whoever is gone is told from the other side, by the end of its own direction.
    let how = match io::copy(&mut from, &mut to) {
        Ok(_) => Shutdown::Write,
        Err(_) => Shutdown::Both,
    };
    drop(to.shutdown(how));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_two_numbers() {
        assert_eq!("0:3000".parse(), Ok(Ports { here: 0, lab: 3000 }));
        for text in ["", "1", "1:", ":1", "1:0", "1:65536", "x:1", "1:2:3"] {
            assert!(text.parse::<Ports>().is_err(), "{text}");
        }
    }
}
