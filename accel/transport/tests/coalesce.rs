//! Records that a server leaves in their ring: who puts them and does nothing more has them carried out all the same, who waits is
//! answered at once, and the server is not woken for each. Knows rings by their ends alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use accel_transport::{ClientConnection, ClientEnd, Error, Offer, Settings, Transport, accept, connect};
use wire::packet::PacketSocket;
use wire::ring::Record;

/// No machine is so busy that something takes longer.
const MOST: Duration = Duration::from_secs(60);

/// In the first word of a record that is to be answered.
const ASK: u64 = 1;

/// How a server leaves records: none, for a time by its client's clock, and for as long as it likes.
const LEFT: [Option<Duration>; 3] = [Some(Duration::ZERO), Some(Duration::from_micros(50)), None];

/// A client and a server of one process.
struct Pair {
    client: ClientConnection,
    /// Records that the server has taken.
    taken: Arc<AtomicU64>,
    server: JoinHandle<()>,
}

impl Pair {
    fn new(transport: Transport, left: Option<Duration>) -> Self {
        let (near, far) = PacketSocket::pair().unwrap();
        let taken = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&taken);
        let server = spawn(move || serve(far, transport, left, &counted));
        let offer = Offer {
            transports: vec![transport],
            pairs: 1,
            patience: MOST,
        };
        Self {
            client: connect(near, &offer).unwrap(),
            taken,
            server,
        }
    }

    fn end(&mut self) -> &mut ClientEnd {
        &mut self.client.ends[0]
    }

    fn send(&mut self) {
        self.end().send(&Record::default(), MOST).unwrap();
    }

    fn ask(&mut self) {
        let question = Record::from_words([ASK, 0, 0, 0, 0, 0, 0, 0]);
        self.end().call(&question, MOST).unwrap();
    }

    /// The server finds out that records come often.
    fn warm_up(&mut self) {
        for _ in 0..50 {
            self.send();
            self.ask();
        }
    }

    /// Until the server has taken so many.
    fn wait_for(&self, records: u64) {
        let begun = Instant::now();
        while self.taken.load(Ordering::Acquire) < records {
            assert!(begun.elapsed() < MOST, "a record was left for ever");
            sleep(Duration::from_millis(1));
        }
    }

    fn end_both(self) {
        drop(self.client);
        self.server.join().unwrap();
    }
}

fn serve(socket: PacketSocket, transport: Transport, left: Option<Duration>, taken: &AtomicU64) {
    let settings = Settings {
        transports: vec![transport],
        pairs: 1,
        records: 256,
        arena: 1 << 16,
        patience: MOST,
        busy_poll: None,
    };
    let mut connection = accept(socket, &settings).unwrap();
    let mut end = connection.ends.remove(0);
    end.coalesce(left);
    loop {
        let request = match end.receive(None) {
            Ok(request) => request,
            Err(Error::PeerGone) => return,
            Err(error) => panic!("{error}"),
        };
        taken.fetch_add(1, Ordering::Release);
        let answer = (request.words()[0] == ASK).then_some(request);
        end.finish(&request, answer.as_ref(), MOST).unwrap();
    }
}

#[test]
fn what_is_left_is_carried_out_though_the_client_does_nothing_more() {
    for transport in [Transport::Spin, Transport::Bell, Transport::SameCpu] {
        for left in LEFT {
            let mut pair = Pair::new(transport, left);
            pair.warm_up();
            pair.send();
            pair.wait_for(101);
            // Also where the server has slept for longer meanwhile.
            sleep(Duration::from_millis(20));
            pair.send();
            pair.wait_for(102);
            pair.end_both();
        }
    }
}

#[test]
fn who_waits_wakes_a_server_that_leaves_records() {
    const ASKED: usize = 50;
    for transport in [Transport::Spin, Transport::Bell, Transport::SameCpu] {
        // With a record that is left before, and without one.
        for before in [1, 0] {
            let mut pair = Pair::new(transport, None);
            pair.warm_up();
            let wakes = (0..ASKED).filter(|_| {
                (0..before).for_each(|_| pair.send());
                // The server has gone to sleep, and leaves it.
                sleep(Duration::from_micros(300));
                let bells = pair.end().counters().bells;
                pair.ask();
                pair.end().counters().bells > bells
            });
            let wakes = wakes.count();
            assert!(wakes >= ASKED / 4 * 3, "{transport}, {before} before: {wakes}");
            pair.end_both();
        }
    }
}

#[test]
fn the_server_is_not_woken_for_each_record() {
    const RECORDS: u64 = 100;
    let bells = LEFT.map(|left| {
        let mut pair = Pair::new(Transport::SameCpu, left);
        pair.warm_up();
        let before = pair.end().counters().bells;
        for _ in 0..RECORDS {
            pair.send();
            sleep(Duration::from_micros(200));
        }
        let bells = pair.end().counters().bells - before;
        pair.end_both();
        bells
    });
    let [none, _, all] = bells;
    assert!(none >= RECORDS / 2, "who leaves none is woken: {bells:?}");
    assert!(
        all <= RECORDS / 4,
        "who leaves half of a ring is woken for that: {bells:?}"
    );
}
