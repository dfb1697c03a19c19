//! The driver's end of the socket.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use base::ByteSize;
use wire::packet::{PacketError, PacketSocket};

use crate::message::{ApiError, Event, Info, MetricSample, Packet, Reply, Request, StopReason, Written};
use crate::{
    DeviceSpec, FdRef, FreezeConfig, Functions, LinkConfig, PageRuns, RestoreConfig, SnapshotConfig, VERSION, VmConfig,
};

/// How many late answers are put up with while one is waited for.
const MAX_LATE: usize = 16;

/// How many events are kept for whoever asks for them; a VM has one end.
const MAX_EVENTS: usize = 16;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket failed; [`PacketError::Closed`] means that the VMM is gone.
    #[error("the VMM cannot be reached: {0}")]
    Packet(#[from] PacketError),
    /// The VMM said something that is no reply.
    #[error("the VMM answered with something that is not understood: {0}")]
    Malformed(String),
    /// The VMM refused.
    #[error("{0}")]
    Refused(#[from] ApiError),
}

impl ClientError {
    /// The VMM process is gone.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Packet(PacketError::Closed))
    }
}

/// A typed client over one packet socket.
#[derive(Debug)]
pub struct VmmClient {
    socket: PacketSocket,
    next_id: u64,
    events: VecDeque<Event>,
}

impl VmmClient {
    /// A client over a connected socket.
    pub fn new(socket: PacketSocket) -> Self {
        Self {
            socket,
            next_id: 1,
            events: VecDeque::new(),
        }
    }

    /// Builds the VM; `fds` are what [`crate::FdRef`]s of the configuration count.
    ///
    /// # Errors
    /// Refused: see [`crate::ErrorKind`].
    pub fn create(&mut self, config: VmConfig, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done(Request::Create(Box::new(config)), fds)
    }

    /// Builds the VM from a snapshot, paused; `fds` as for [`VmmClient::create`].
    ///
    /// # Errors
    /// Refused: see [`crate::ErrorKind`].
    pub fn restore(&mut self, config: RestoreConfig, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done(Request::Restore(Box::new(config)), fds)
    }

    /// Writes the VM's state and memory to two empty files; only what has changed, if its memory is mapped from `base`.
    ///
    /// # Errors
    /// Refused unless paused.
    pub fn snapshot(
        &mut self,
        state: BorrowedFd<'_>,
        memory: BorrowedFd<'_>,
        base: &[BorrowedFd<'_>],
    ) -> Result<Written, ClientError> {
        let config = SnapshotConfig {
            state: FdRef(0),
            memory: FdRef(1),
            base: (2..).take(base.len()).map(FdRef).collect(),
        };
        let fds: Vec<_> = [state, memory].into_iter().chain(base.iter().copied()).collect();
        match self.call(Request::Snapshot(config), &fds)? {
            Reply::Written(written) => Ok(written),
            other => Err(ClientError::Malformed(format!("{other:?} to `snapshot`"))),
        }
    }

    /// Has the VM's memory mapped from what was written last; `memory` is that file, to be read.
    ///
    /// # Errors
    /// Refused unless paused ever since.
    pub fn rebase(&mut self, memory: BorrowedFd<'_>) -> Result<(), ClientError> {
        self.done(Request::Rebase(FdRef(0)), &[memory])
    }

    /// Which pages have changed since the VM was restored; none where the VMM cannot tell.
    ///
    /// # Errors
    /// Refused where there is no VM.
    pub fn write_set(&mut self) -> Result<PageRuns, ClientError> {
        match self.call(Request::WriteSet, &[])? {
            Reply::WriteSet(runs) => Ok(runs),
            other => Err(ClientError::Malformed(format!("{other:?} to `write-set`"))),
        }
    }

    /// In which order pages were asked for; none of a VM that was not restored on demand, or with an order.
    ///
    /// # Errors
    /// Refused where there is no VM.
    pub fn page_order(&mut self) -> Result<PageRuns, ClientError> {
        match self.call(Request::PageOrder, &[])? {
            Reply::PageOrder(runs) => Ok(runs),
            other => Err(ClientError::Malformed(format!("{other:?} to `page-order`"))),
        }
    }

    /// Puts the VM back to a snapshot that its memory is mapped from; it is paused then. `fds` as for [`VmmClient::create`].
    ///
    /// # Errors
    /// Refused; whether the VM is still there is told by [`VmmClient::info`].
    pub fn rollback(&mut self, config: RestoreConfig, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done(Request::Rollback(Box::new(config)), fds)
    }

    /// Lets the vCPUs run for the first time.
    ///
    /// # Errors
    /// Refused before `create` and after the end.
    pub fn start(&mut self) -> Result<(), ClientError> {
        self.done(Request::Start, &[])
    }

    /// Stops vCPUs and devices; returns when all have stopped.
    ///
    /// # Errors
    /// Refused unless running.
    pub fn pause(&mut self) -> Result<(), ClientError> {
        self.done(Request::Pause, &[])
    }

    /// Lets vCPUs and devices go on.
    ///
    /// # Errors
    /// Refused unless paused.
    pub fn resume(&mut self) -> Result<(), ClientError> {
        self.done(Request::Resume, &[])
    }

    /// Gives the VM a function of the host's, beside its guest; `fds` as for [`VmmClient::create`]. See [`VmmClient::functions`] for what
    /// becomes of it.
    ///
    /// # Errors
    /// Refused: the descriptors do not fit, the VM has a function of that name, or cannot have any.
    pub fn attach(&mut self, device: DeviceSpec, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.done(Request::Attach(device), fds)
    }

    /// Takes a function from the VM.
    ///
    /// # Errors
    /// Refused where it has none of that name.
    pub fn detach(&mut self, id: &str) -> Result<(), ClientError> {
        self.done(Request::Detach(id.to_owned()), &[])
    }

    /// Which functions of the host's the VM has, and how far it is with those that it is to get.
    ///
    /// # Errors
    /// Refused where there is no VM.
    pub fn functions(&mut self) -> Result<Functions, ClientError> {
        match self.call(Request::Functions, &[])? {
            Reply::Functions(functions) => Ok(functions),
            other => Err(ClientError::Malformed(format!("{other:?} to `functions`"))),
        }
    }

    /// Requests that so much of the hot-pluggable memory is plugged. The guest follows when it can: [`Info::hotplug_memory`] tells.
    ///
    /// # Errors
    /// Refused where there is no such memory, or for a size that it cannot have.
    pub fn resize_memory(&mut self, size: ByteSize) -> Result<(), ClientError> {
        self.done(Request::ResizeMemory(size), &[])
    }

    /// Has so much of the hot-pluggable memory mapped for functions of the host's, before the guest is asked to plug it.
    ///
    /// # Errors
    /// As [`VmmClient::resize_memory`].
    pub fn map_ahead(&mut self, size: ByteSize) -> Result<(), ClientError> {
        self.done(Request::MapAhead(size), &[])
    }

    /// Has these files used in place of hot-pluggable memory that nothing is plugged of, so that the host need not zero it. How much of them
    /// was taken is told by [`VmmClient::functions`].
    ///
    /// # Errors
    /// Refused where [`Functions::zeroed_memory`] is `None`, or for a file that cannot be used.
    pub fn add_zeroed_memory(&mut self, files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let places = (0..).take(files.len()).map(FdRef).collect();
        self.done(Request::AddZeroedMemory(places), files)
    }

    /// Requests that the guest does without so much of its memory. It follows when it can: [`Info::balloon`] tells.
    ///
    /// # Errors
    /// Refused where there is no balloon, or for a size that it cannot have.
    pub fn resize_balloon(&mut self, size: ByteSize) -> Result<(), ClientError> {
        self.done(Request::ResizeBalloon(size), &[])
    }

    /// Freezes the VM when its guest says next that it waits, and gives what others are linked to it by; `None` as long as it has not said
    /// so: [`Event::Frozen`] tells when to ask again.
    ///
    /// # Errors
    /// Refused where it cannot serve.
    pub fn freeze(&mut self, budget_us: u32) -> Result<Option<OwnedFd>, ClientError> {
        let (reply, mut fds) = self.call_for_fds(Request::Freeze(FreezeConfig { budget_us }), &[], None)?;
        match (reply, fds.pop(), fds.is_empty()) {
            (Reply::Freezing, None, true) => Ok(None),
            (Reply::Frozen, Some(server), true) => Ok(Some(server)),
            (reply, server, _) => {
                let count = fds.len() + usize::from(server.is_some());
                Err(ClientError::Malformed(format!(
                    "{reply:?} with {count} descriptors to `freeze`"
                )))
            }
        }
    }

    /// Lets the guest enter a frozen VM by this number, or, with `None`, not any more.
    ///
    /// # Errors
    /// Refused where it cannot, or where the number has a link already, or none.
    pub fn link(&mut self, index: u32, server: Option<BorrowedFd<'_>>) -> Result<(), ClientError> {
        let fds: Vec<_> = server.into_iter().collect();
        let server = server.map(|_| FdRef(0));
        self.done(Request::Link(LinkConfig { index, server }), &fds)
    }

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// Refused unless running.
    pub fn press_power_button(&mut self) -> Result<(), ClientError> {
        self.done(Request::PressPowerButton, &[])
    }

    /// Ends the VM and the process.
    ///
    /// # Errors
    /// The VMM was gone already.
    pub fn stop(&mut self) -> Result<(), ClientError> {
        self.done(Request::Stop, &[])
    }

    /// What the VM is and does.
    ///
    /// # Errors
    /// The VMM is gone.
    pub fn info(&mut self) -> Result<Info, ClientError> {
        match self.call(Request::Info, &[])? {
            Reply::Info(info) => Ok(info),
            other => Err(ClientError::Malformed(format!("{other:?} to `info`"))),
        }
    }

    /// Every metric.
    ///
    /// # Errors
    /// The VMM is gone.
    pub fn metrics(&mut self) -> Result<Vec<MetricSample>, ClientError> {
        self.metrics_before(None)
    }

    /// The same for who waits until then and no longer, whatever the VMM says instead of an answer.
    ///
    /// # Errors
    /// The VMM is gone, or late: [`PacketError::Late`].
    pub fn metrics_by(&mut self, deadline: Instant) -> Result<Vec<MetricSample>, ClientError> {
        self.metrics_before(Some(deadline))
    }

    fn metrics_before(&mut self, deadline: Option<Instant>) -> Result<Vec<MetricSample>, ClientError> {
        match self.call_by(Request::Metrics, &[], deadline)? {
            Reply::Metrics(metrics) => Ok(metrics),
            other => Err(ClientError::Malformed(format!("{other:?} to `metrics`"))),
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// The VMM is gone without saying why.
    pub fn wait_event(&mut self) -> Result<Event, ClientError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(event);
        }
        match self.receive()? {
            Packet::Event(event) => Ok(event),
            other => Err(ClientError::Malformed(format!("{other:?} where an event was due"))),
        }
    }

    /// Why the VMM has stopped the VM, where it has told so since this was last asked. Waits for nothing, and keeps other events
    /// for [`VmmClient::wait_event`].
    ///
    /// # Errors
    /// The VMM is gone.
    pub fn take_stop(&mut self) -> Result<Option<StopReason>, ClientError> {
        for _ in 0..MAX_EVENTS {
            match self.socket.wait_to_receive(Instant::now()) {
                Ok(()) => (),
                Err(PacketError::Late) => break,
                Err(error) => return Err(error.into()),
            }
            match self.receive() {
                Ok(Packet::Event(event)) => self.keep_event(event)?,
                // To a question that was given up when its time was over.
                Ok(Packet::Reply { .. }) => (),
                Ok(other) => return Err(ClientError::Malformed(format!("{other:?}"))),
                // What it said before its end stays.
                Err(error) if error.is_gone() && !self.events.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        let stops = |event: &Event| matches!(event, Event::Stopped(_));
        let found = self.events.iter().position(stops).and_then(|at| self.events.remove(at));
        Ok(match found {
            Some(Event::Stopped(reason)) => Some(reason),
            _ => None,
        })
    }

    /// Whether an event waits that has been received.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    fn keep_event(&mut self, event: Event) -> Result<(), ClientError> {
        // Of several stops the last one counts.
        if matches!(event, Event::Stopped(_)) {
            self.events.retain(|other| !matches!(other, Event::Stopped(_)));
        }
        // A VMM that its guest has taken over must not keep us here.
        if self.events.len() >= MAX_EVENTS {
            return Err(ClientError::Malformed("events without end".into()));
        }
        self.events.push_back(event);
        Ok(())
    }

    fn done(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        match self.call(request, fds)? {
            Reply::Done => Ok(()),
            other => Err(ClientError::Malformed(format!("{other:?} where `done` was due"))),
        }
    }

    fn call(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<Reply, ClientError> {
        self.call_by(request, fds, None)
    }

    fn call_by(
        &mut self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<Reply, ClientError> {
        Ok(self.call_for_fds(request, fds, deadline)?.0)
    }

    /// The answer, and the descriptors that came with it.
    fn call_for_fds(
        &mut self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        let id = self.next_id;
        self.next_id += 1;
        let packet = Packet::Request {
            id,
            version: VERSION,
            request,
        };
        let bytes = serde_json::to_vec(&packet).map_err(|e| ClientError::Malformed(e.to_string()))?;
        if let Some(deadline) = deadline {
            self.socket.wait_to_send(deadline)?;
        }
        self.socket.send(&bytes, fds)?;
        let mut late = 0;
        loop {
            if let Some(deadline) = deadline {
                self.socket.wait_to_receive(deadline)?;
            }
            let (packet, fds) = self.receive_with_fds()?;
            match packet {
                Packet::Event(event) => self.keep_event(event)?,
                Packet::Reply { id: answered, result } if answered == id => return Ok((result?, fds)),
                // To a question that was given up when its time was over.
                Packet::Reply { id: answered, .. } if answered < id && late < MAX_LATE => late += 1,
                other => return Err(ClientError::Malformed(format!("{other:?}"))),
            }
        }
    }

    fn receive(&mut self) -> Result<Packet, ClientError> {
        Ok(self.receive_with_fds()?.0)
    }

    fn receive_with_fds(&mut self) -> Result<(Packet, Vec<OwnedFd>), ClientError> {
        let (bytes, fds) = self.socket.receive()?;
        let packet = serde_json::from_slice(&bytes).map_err(|e| ClientError::Malformed(e.to_string()))?;
        Ok((packet, fds))
    }
}

impl AsFd for VmmClient {
    /// Readable when an event is due or the VMM is gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests;
