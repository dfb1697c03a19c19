//! The driver's end of the socket.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use base::ByteSize;
use wire::packet::{PacketError, PacketSocket};

use crate::message::{ApiError, Event, Info, MetricSample, Packet, Reply, Request, StopReason, Written};
use crate::{DeviceSpec, FdRef, Functions, PageRuns, RestoreConfig, SnapshotConfig, VERSION, VmConfig};

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
            match self.receive()? {
                Packet::Event(event) => self.keep_event(event)?,
                Packet::Reply { id: answered, result } if answered == id => return Ok(result?),
                // To a question that was given up when its time was over.
                Packet::Reply { id: answered, .. } if answered < id && late < MAX_LATE => late += 1,
                other => return Err(ClientError::Malformed(format!("{other:?}"))),
            }
        }
    }

    fn receive(&mut self) -> Result<Packet, ClientError> {
        let (bytes, _) = self.socket.receive()?;
        serde_json::from_slice(&bytes).map_err(|e| ClientError::Malformed(e.to_string()))
    }
}

impl AsFd for VmmClient {
    /// Readable when an event is due or the VMM is gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::*;
    use crate::{ErrorKind, ExitReason};

    fn answer(socket: &PacketSocket, result: Result<Reply, ApiError>) -> Request {
        let (bytes, _) = socket.receive().unwrap();
        let Packet::Request { id, version, request } = serde_json::from_slice(&bytes).unwrap() else {
            panic!()
        };
        assert_eq!(version, VERSION);
        let event = Packet::Event(Event::Ended(ExitReason::PowerOff));
        socket.send(&serde_json::to_vec(&event).unwrap(), &[]).unwrap();
        socket
            .send(&serde_json::to_vec(&Packet::Reply { id, result }).unwrap(), &[])
            .unwrap();
        request
    }

    #[test]
    fn events_without_end_are_not_listened_to() {
        let (near, far) = PacketSocket::pair().unwrap();
        let vmm = std::thread::spawn(move || {
            let event = serde_json::to_vec(&Packet::Event(Event::Ended(ExitReason::PowerOff))).unwrap();
            while far.send(&event, &[]).is_ok() {}
        });
        let mut client = VmmClient::new(near);
        assert!(matches!(client.start(), Err(ClientError::Malformed(_))));
        drop(client);
        vmm.join().unwrap();
    }

    #[test]
    fn who_says_something_else_now_and_then_is_waited_for_no_longer() {
        let (near, far) = PacketSocket::pair().unwrap();
        let vmm = std::thread::spawn(move || {
            let event = serde_json::to_vec(&Packet::Event(Event::Ended(ExitReason::PowerOff))).unwrap();
            while far.send(&event, &[]).is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let mut client = VmmClient::new(near);
        let error = client
            .metrics_by(Instant::now() + Duration::from_millis(300))
            .unwrap_err();
        assert!(matches!(error, ClientError::Packet(PacketError::Late)), "{error}");
        drop(client);
        vmm.join().unwrap();
        // One that reads nothing.
        let (near, _far) = PacketSocket::pair().unwrap();
        let mut client = VmmClient::new(near);
        for _ in 0..10_000 {
            let error = client.metrics_by(Instant::now()).unwrap_err();
            assert!(matches!(error, ClientError::Packet(PacketError::Late)), "{error}");
        }
    }

    #[test]
    fn an_answer_that_comes_too_late_is_not_taken_for_the_next_one() {
        let (near, far) = PacketSocket::pair().unwrap();
        let mut client = VmmClient::new(near);
        for (id, metrics) in [(client.next_id, 1), (client.next_id + 1, 2)] {
            let samples = vec![
                MetricSample {
                    name: "x".into(),
                    labels: Vec::new(),
                    value: 1
                };
                metrics
            ];
            let packet = Packet::Reply {
                id,
                result: Ok(Reply::Metrics(samples)),
            };
            far.send(&serde_json::to_vec(&packet).unwrap(), &[]).unwrap();
        }
        client.next_id += 1;
        assert_eq!(client.metrics().unwrap().len(), 2);
    }

    #[test]
    fn stops_are_told_once_the_last_one_and_the_end_stays() {
        let (near, far) = PacketSocket::pair().unwrap();
        let mut client = VmmClient::new(near);
        assert_eq!(client.take_stop().unwrap(), None, "nobody waits for one");
        let stopped = |disk: &str| StopReason::NoSpace {
            disks: vec![disk.to_owned()],
        };
        let tell = |event| {
            far.send(&serde_json::to_vec(&Packet::Event(event)).unwrap(), &[])
                .unwrap()
        };
        (0..MAX_EVENTS + 3).for_each(|_| tell(Event::Stopped(stopped("old"))));
        (0..2).for_each(|_| drop(client.take_stop().unwrap()));
        tell(Event::Stopped(stopped("data")));
        tell(Event::Stopped(stopped("root")));
        tell(Event::Ended(ExitReason::PowerOff));
        drop(far);
        assert_eq!(client.take_stop().unwrap(), Some(stopped("root")));
        assert_eq!(client.take_stop().unwrap(), None);
        assert_eq!(client.wait_event().unwrap(), Event::Ended(ExitReason::PowerOff));
        assert!(client.take_stop().unwrap_err().is_gone());
    }

    #[test]
    fn zeroed_memory_is_as_many_files_as_come_along() {
        let (near, far) = PacketSocket::pair().unwrap();
        let vmm = std::thread::spawn(move || {
            let (bytes, files) = far.receive().unwrap();
            let packet: Packet = serde_json::from_slice(&bytes).unwrap();
            let result = Ok(Reply::Done);
            far.send(&serde_json::to_vec(&Packet::Reply { id: 1, result }).unwrap(), &[])
                .unwrap();
            (packet, files.len())
        });
        let file = File::open("/dev/null").unwrap();
        VmmClient::new(near)
            .add_zeroed_memory(&[file.as_fd(), file.as_fd(), file.as_fd()])
            .unwrap();
        let (packet, files) = vmm.join().unwrap();
        let Packet::Request { request, .. } = packet else {
            panic!("{packet:?}")
        };
        assert_eq!(request, Request::AddZeroedMemory(vec![FdRef(0), FdRef(1), FdRef(2)]));
        assert_eq!(files, 3);
    }

    #[test]
    fn a_refusal_and_an_event_in_between_are_told_apart() {
        let (near, far) = PacketSocket::pair().unwrap();
        let refusal = ApiError {
            kind: ErrorKind::WrongState,
            message: "the VM is empty: create it first".into(),
        };
        let vmm = std::thread::spawn(move || answer(&far, Err(refusal)));
        let mut client = VmmClient::new(near);
        let error = client.start().unwrap_err();
        assert!(matches!(&error, ClientError::Refused(e) if e.kind == ErrorKind::WrongState));
        assert_eq!(vmm.join().unwrap(), Request::Start);
        assert_eq!(client.wait_event().unwrap(), Event::Ended(ExitReason::PowerOff));
        assert!(client.wait_event().unwrap_err().is_gone());
    }
}
