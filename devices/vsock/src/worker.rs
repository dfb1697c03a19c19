//! The one thread of the device: waits for kicks and sockets, then moves what can be moved.
//!
//! ```text
//!      ┌──────────▶ round: packets from the guest, then packets to it; one interrupt for each queue that moved
//!      │                 │
//!      │                 ▼
//!      │            wait: at once if there is more, else until a kick, a socket, a deadline or the stop signal
//!      │                 │
//!      └── events ◀──────┤
//!                        └── stop ──▶ the state goes back to the device, no buffer is held
//! ```

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Interest, Ready, StopSignal};
use memory::GuestRam;
use virtio::QueueInterrupt;

use crate::events::Events;
use crate::ring::Ring;
use crate::switch::Switch;

const STOP: u64 = 0;
const RX_KICK: u64 = 1;
const TX_KICK: u64 = 2;
/// The listener's token. Connections' are above 2^32.
pub(crate) const LISTENER: u64 = 3;
const EVENT_KICK: u64 = 4;

/// Everything that the thread owns.
pub(crate) struct Running {
    pub(crate) switch: Switch,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) rx: Ring,
    pub(crate) tx: Ring,
    pub(crate) events: Events,
}

/// The thread's body.
pub(crate) fn run(mut running: Box<Running>, stop: &StopSignal) -> Box<Running> {
    if let Err(error) = running.serve(stop) {
        log::error!("vsock has stopped working: {error}");
    }
    running
}

impl Running {
    fn serve(&mut self, stop: &StopSignal) -> io::Result<()> {
        self.switch.epoll.add(stop.fd(), STOP, Interest::READ)?;
        self.switch.epoll.add(&*self.rx.active.kick, RX_KICK, Interest::READ)?;
        self.switch.epoll.add(&*self.tx.active.kick, TX_KICK, Interest::READ)?;
        if let Some(ring) = &self.events.ring {
            self.switch.epoll.add(&*ring.active.kick, EVENT_KICK, Interest::READ)?;
        }
        self.switch.resume(Instant::now());
        let result = self.serve_until_stopped();
        if let Some(ring) = &self.events.ring {
            self.switch.epoll.remove(&*ring.active.kick)?;
        }
        self.switch.epoll.remove(&*self.tx.active.kick)?;
        self.switch.epoll.remove(&*self.rx.active.kick)?;
        self.switch.epoll.remove(stop.fd())?;
        result
    }

    fn serve_until_stopped(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let timeout = if self.round() {
                Some(Duration::ZERO)
            } else {
                self.switch.timeout(Instant::now())
            };
            self.switch.epoll.wait(&mut ready, timeout)?;
            let now = Instant::now();
            let mut stopping = false;
            for &event in &ready {
                stopping |= event.token == STOP;
                self.on_event(event, now);
            }
            if stopping {
                return Ok(());
            }
            self.switch.expire(now);
        }
    }

    fn on_event(&mut self, event: Ready, now: Instant) {
        match event.token {
            STOP => (),
            // The round after this looks at both rings.
            RX_KICK => drop(self.rx.active.kick.consume()),
            TX_KICK => drop(self.tx.active.kick.consume()),
            EVENT_KICK => {
                if let Some(ring) = &self.events.ring {
                    ring.active.kick.consume();
                }
            }
            LISTENER => self.switch.on_listener(now),
            _ => self.switch.on_socket(event, now),
        }
    }

    /// Moves what can be moved, a ring full each way. True when there is more.
    fn round(&mut self) -> bool {
        let was_full = self.switch.resets.is_full();
        let mut more = self.take_packets();
        let stalled = was_full || self.switch.resets.is_full();
        if self.events.settle(&self.memory, &*self.interrupt) {
            more |= self.switch.deliver(&mut self.rx, &self.memory);
        } else {
            self.switch.wait_for_buffers();
        }
        // Packets may have waited until RSTs went out.
        more |= stalled && !self.switch.resets.is_full();
        self.tx.publish(&self.memory, &*self.interrupt);
        self.rx.publish(&self.memory, &*self.interrupt);
        more
    }

    /// Deals with the guest's packets. True when some are left that need not wait for anything.
    fn take_packets(&mut self) -> bool {
        self.tx.ignore(&self.memory);
        for _ in 0..self.tx.size() {
            if self.switch.resets.is_full() {
                return false;
            }
            let head = match self.tx.take_or_listen(&self.memory) {
                None => return false,
                Some(Ok(chain)) => {
                    self.switch.on_packet(&chain);
                    chain.head()
                }
                Some(Err(bad)) => {
                    self.switch.malformed(format_args!("a packet cannot be read: {bad}"));
                    bad.head
                }
            };
            self.tx.give(&self.memory, head, 0);
        }
        true
    }
}
