//! Sources over irqfds that behave as KVM's are said to, and fail when they are told to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use base::EventFd;
use engine::{Deliver, Interrupt, MsiMessage};

use super::{Calls, Routes, Source};

const PINS: u32 = 8;

/// What was asked of KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Table(Vec<(u32, MsiMessage)>),
    Assign(u32),
    Deassign(u32),
}

#[derive(Default)]
struct Kvm {
    calls: Mutex<Vec<Call>>,
    table: Mutex<BTreeMap<u32, MsiMessage>>,
    /// GSIs that have an irqfd.
    assigned: Mutex<BTreeSet<u32>>,
    delivered: Mutex<Vec<MsiMessage>>,
    fails: Mutex<Option<&'static str>>,
}

impl Kvm {
    fn told(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn delivered(&self) -> Vec<u32> {
        let delivered = std::mem::take(&mut *self.delivered.lock().unwrap());
        delivered.into_iter().map(|message| message.data).collect()
    }

    fn fail(&self, call: Option<&'static str>) {
        *self.fails.lock().unwrap() = call;
    }

    fn check(&self, call: &str) -> std::io::Result<()> {
        match *self.fails.lock().unwrap() {
            Some(fails) if fails == call => Err(std::io::ErrorKind::OutOfMemory.into()),
            _ => Ok(()),
        }
    }

    /// The driver signals the event of this GSI: what has an irqfd is delivered, and what has none stays in the event.
    fn signal(&self, event: &EventFd, gsi: u32) {
        event.signal();
        if self.assigned.lock().unwrap().contains(&gsi) {
            assert!(event.consume());
            self.deliver(gsi);
        }
    }

    /// Without a route it would be lost.
    fn deliver(&self, gsi: u32) {
        let message = self.table.lock().unwrap().get(&gsi).copied();
        self.delivered.lock().unwrap().push(message.expect("a signal was lost"));
    }
}

impl Calls for Kvm {
    fn most_routes(&self) -> u32 {
        PINS + 4
    }

    fn set_routes(&self, routes: &[(u32, MsiMessage)]) -> std::io::Result<()> {
        self.check("table")?;
        self.calls.lock().unwrap().push(Call::Table(routes.to_vec()));
        *self.table.lock().unwrap() = routes.iter().copied().collect();
        Ok(())
    }

    fn assign(&self, event: &EventFd, gsi: u32) -> std::io::Result<()> {
        self.check("assign")?;
        self.calls.lock().unwrap().push(Call::Assign(gsi));
        assert!(self.assigned.lock().unwrap().insert(gsi), "EBUSY");
        // It looks and delivers, and leaves the event as it is.
        if event.consume() {
            event.signal();
            self.deliver(gsi);
        }
        Ok(())
    }

    fn deassign(&self, event: &EventFd, gsi: u32) -> std::io::Result<()> {
        self.check("deassign")?;
        self.calls.lock().unwrap().push(Call::Deassign(gsi));
        assert!(self.assigned.lock().unwrap().remove(&gsi));
        event.consume();
        Ok(())
    }
}

/// Of emulated devices; no test here has one.
struct Nobody;

impl Deliver for Nobody {
    fn deliver(&self, message: MsiMessage) {
        panic!("{message:?} was sent");
    }
}

struct Setup {
    kvm: Arc<Kvm>,
    routes: Arc<Routes<Kvm>>,
}

impl Setup {
    fn new() -> Self {
        let kvm = Arc::<Kvm>::default();
        let routes = Arc::new(Routes::new(Arc::clone(&kvm)));
        routes.reserve(PINS);
        Self { kvm, routes }
    }

    fn source(&self) -> Source<Kvm, Nobody> {
        Source::new(Arc::clone(&self.routes), Nobody)
    }

    /// A source with an event, and the driver's copy of that.
    fn attached(&self) -> (Source<Kvm, Nobody>, EventFd) {
        let source = self.source();
        let event = EventFd::new().unwrap();
        source.attach(event.try_clone().unwrap()).unwrap();
        (source, event)
    }
}

const fn to(data: u32) -> MsiMessage {
    MsiMessage {
        address: 0xfee0_0000,
        data,
    }
}

#[test]
fn signals_go_where_the_message_says_and_are_kept_while_there_is_none() {
    let setup = Setup::new();
    let kvm = &setup.kvm;
    let (source, event) = setup.attached();
    kvm.signal(&event, PINS);
    kvm.signal(&event, PINS);
    assert!(source.is_pending() && source.is_pending());
    source.route(Some(to(0x41)));
    assert_eq!(kvm.told(), [Call::Table(vec![(PINS, to(0x41))]), Call::Assign(PINS)]);
    assert_eq!(kvm.delivered(), [0x41], "once, however often it was signalled");
    assert!(
        !source.is_pending(),
        "what the assign has left in the event was delivered"
    );
    kvm.signal(&event, PINS);
    assert_eq!(kvm.delivered(), [0x41]);
    source.route(None);
    assert_eq!(kvm.told(), [Call::Deassign(PINS)]);
    assert!(!source.is_pending(), "nothing came while it was masked");
    source.trigger();
    assert!(source.is_pending());
    source.route(Some(to(0x42)));
    assert_eq!(kvm.delivered(), [0x42]);
}

#[test]
fn a_vector_that_is_masked_for_a_moment_needs_no_table() {
    let setup = Setup::new();
    let (source, event) = setup.attached();
    source.route(Some(to(0x41)));
    setup.kvm.told();
    for _ in 0..3 {
        source.route(None);
        source.route(None);
        source.route(Some(to(0x41)));
    }
    let told = setup.kvm.told();
    assert_eq!(told.len(), 6);
    for round in told.chunks(2) {
        assert_eq!(round, [Call::Deassign(PINS), Call::Assign(PINS)]);
    }
    // And one whose message changes while it is routed keeps its irqfd.
    source.route(Some(to(0x50)));
    assert_eq!(setup.kvm.told(), [Call::Table(vec![(PINS, to(0x50))])]);
    setup.kvm.signal(&event, PINS);
    assert_eq!(setup.kvm.delivered(), [0x50]);
}

#[test]
fn vectors_that_are_prepared_have_one_table() {
    let setup = Setup::new();
    let sources: Vec<_> = (0..4).map(|_| setup.attached()).collect();
    for (data, (source, _)) in (0x41..).zip(&sources) {
        source.prepare(to(data));
    }
    assert!(setup.kvm.told().is_empty(), "a hint");
    for (data, (source, _)) in (0x41..).zip(&sources) {
        source.route(Some(to(data)));
    }
    let table = (PINS..).zip((0x41..0x45).map(to)).collect();
    let assigns = (PINS..PINS + 4).map(Call::Assign);
    assert_eq!(
        setup.kvm.told(),
        std::iter::once(Call::Table(table)).chain(assigns).collect::<Vec<_>>()
    );
}

#[test]
fn gsis_come_behind_the_pins_and_come_back() {
    let setup = Setup::new();
    let mut sources: Vec<_> = (0..4).map(|_| setup.attached().0).collect();
    let error = setup.source().attach(EventFd::new().unwrap()).unwrap_err().to_string();
    assert!(error.contains("all 4 interrupt routes"), "{error}");
    let error = sources[0].attach(EventFd::new().unwrap()).unwrap_err().to_string();
    assert!(error.contains("all 4 interrupt routes"), "{error}");
    for source in &sources {
        source.route(Some(to(0x41)));
    }
    setup.kvm.told();
    drop(sources.remove(1));
    assert_eq!(setup.kvm.told(), [Call::Deassign(PINS + 1)]);
    let error = sources[0].attach(EventFd::new().unwrap()).unwrap_err().to_string();
    assert!(error.contains("an event already"), "{error}");
    let (source, event) = setup.attached();
    source.route(Some(to(0x41)));
    assert!(setup.kvm.told().ends_with(&[Call::Assign(PINS + 1)]));
    setup.kvm.signal(&event, PINS + 1);
    assert_eq!(setup.kvm.delivered(), [0x41]);
    drop(source);
    drop(sources);
    assert!(setup.kvm.assigned.lock().unwrap().is_empty());
    // Before there are pins nobody knows which GSIs are free.
    let early = Source::new(Arc::new(Routes::new(Arc::<Kvm>::default())), Nobody);
    let error = early.attach(EventFd::new().unwrap()).unwrap_err().to_string();
    assert!(error.contains("before the VM had"), "{error}");
}

#[test]
fn ends_of_a_pin_are_looked_for_in_its_route_and_nothing_is_delivered_by_that() {
    let setup = Setup::new();
    let (source, _) = setup.attached();
    let pin = setup.source();
    let level = to(1 << 15 | 0x31);
    pin.report_ends(7, Some(level)).unwrap();
    assert_eq!(setup.kvm.told(), [Call::Table(vec![(7, level)])]);
    // The guest's next write of the same, as when it masks and unmasks the pin.
    pin.report_ends(7, Some(level)).unwrap();
    assert_eq!(setup.kvm.told(), []);
    source.route(Some(to(0x41)));
    let both = vec![(7, level), (PINS, to(0x41))];
    assert_eq!(setup.kvm.told(), [Call::Table(both), Call::Assign(PINS)]);
    // It is forgotten when there is another reason to tell KVM.
    pin.report_ends(7, None).unwrap();
    pin.report_ends(6, None).unwrap();
    assert_eq!(setup.kvm.told(), []);
    source.route(Some(to(0x42)));
    assert_eq!(setup.kvm.told(), [Call::Table(vec![(PINS, to(0x42))])]);
    // What is no pin's is a device's.
    assert!(pin.report_ends(PINS, Some(level)).is_err());
    setup.kvm.fail(Some("table"));
    assert!(pin.report_ends(7, Some(level)).is_err());
}

#[test]
fn a_message_to_no_apic_spoils_no_other_route() {
    let setup = Setup::new();
    let (source, event) = setup.attached();
    let (other, _) = setup.attached();
    // Bits 7 to 0 of the upper half.
    let nowhere = MsiMessage {
        address: 0x01_fee0_0000,
        data: 0x41,
    };
    source.prepare(nowhere);
    source.route(Some(nowhere));
    other.route(Some(to(0x50)));
    assert_eq!(
        setup.kvm.told(),
        [Call::Table(vec![(PINS + 1, to(0x50))]), Call::Assign(PINS + 1)]
    );
    setup.kvm.signal(&event, PINS);
    let far = MsiMessage {
        address: 0x100_fee0_0000,
        data: 0x41,
    };
    source.route(Some(far));
    assert_eq!(setup.kvm.delivered(), [0x41]);
    source.route(Some(nowhere));
    assert!(setup.kvm.told().ends_with(&[Call::Deassign(PINS)]));
}

#[test]
fn what_kvm_refuses_is_kept_and_tried_again() {
    let setup = Setup::new();
    let kvm = &setup.kvm;
    let (source, event) = setup.attached();
    for call in ["table", "assign"] {
        kvm.fail(Some(call));
        source.route(Some(to(0x41)));
        kvm.signal(&event, PINS);
        assert!(source.is_pending(), "{call}");
        kvm.fail(None);
        source.route(Some(to(0x41)));
        assert_eq!(kvm.delivered(), [0x41], "{call}");
        source.route(None);
        // Another one, so that the next round has a table to set.
        source.route(Some(to(0x42)));
        source.route(None);
    }
    // A message that does not become known does not leave the old one where it was.
    source.route(Some(to(0x41)));
    kvm.fail(Some("table"));
    source.route(Some(to(0x43)));
    kvm.signal(&event, PINS);
    assert!(source.is_pending() && kvm.delivered().is_empty());
    kvm.fail(None);
    source.route(Some(to(0x43)));
    assert_eq!(kvm.delivered(), [0x43]);
    // One that could not be taken from its guest is still its guest's, and its GSI nobody else's.
    kvm.fail(Some("deassign"));
    source.route(None);
    assert!(!source.is_pending());
    drop(source);
    kvm.fail(None);
    let (next, _) = setup.attached();
    next.route(Some(to(0x44)));
    assert!(kvm.told().ends_with(&[Call::Assign(PINS + 1)]));
}
