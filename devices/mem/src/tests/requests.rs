//! What each request is answered, and what the host is asked for meanwhile.

use super::*;

#[test]
fn what_the_specification_refuses_is_an_error_and_asks_nothing_of_the_host() {
    let mut guest = Guest::new(64 * MIB);
    // 64 and 256 MiB are usable: 160 blocks.
    assert_eq!(guest.sizes(), [320, 0, 64]);
    let aside = [
        (START + 4096, 1),
        (START + BLOCK / 2, 1),
        (START, 0),
        (START - BLOCK, 1),
        (START - BLOCK, 2),
        (START + 160 * BLOCK, 1),
        (START + 159 * BLOCK, 2),
        (START + REGION, 1),
        (0, 1),
        (u64::MAX - BLOCK + 1, 1),
        (u64::MAX - BLOCK + 1, u16::MAX),
        (START, u16::MAX),
    ];
    for (addr, blocks) in aside {
        for kind in [PLUG, UNPLUG, STATE] {
            let answer = guest.at(kind, addr, blocks);
            assert_eq!(answer, (ERROR, 0), "{kind} of {blocks} at {addr:#x}");
        }
    }
    for kind in [4, 0x100, u16::MAX] {
        assert_eq!(guest.at(kind, START, 1), (ERROR, 0));
    }
    assert_eq!(guest.host.calls(), []);
    assert_eq!(
        (guest.counted("plug", "error"), guest.counted("other", "error")),
        (12, 3)
    );
    assert_eq!(guest.ask(PLUG, 159, 1), ACK, "the last block that is usable");
}

#[test]
fn only_blocks_in_the_other_state_change_theirs() {
    let mut guest = Guest::new(64 * MIB);
    assert_eq!(guest.ask(PLUG, 10, 4), ACK);
    assert_eq!((guest.state(10, 4), guest.state(0, 10), guest.state(9, 2)), (0, 1, 2));
    assert_eq!(guest.sizes(), [320, 8, 64]);
    for (kind, first, blocks) in [
        (PLUG, 13, 2),
        (PLUG, 9, 2),
        (PLUG, 10, 4),
        (UNPLUG, 13, 2),
        (UNPLUG, 9, 2),
    ] {
        assert_eq!(guest.ask(kind, first, blocks), ERROR, "{kind} of {blocks} from {first}");
    }
    assert_eq!(guest.ask(UNPLUG, 11, 2), ACK);
    assert_eq!((guest.state(10, 4), guest.state(11, 2)), (2, 1));
    assert_eq!(guest.sizes(), [320, 4, 64]);
    let calls = [call("plug", 10, 4, 0), call("unplug", 11, 2, 8 * MIB)];
    assert_eq!(guest.host.calls(), calls);
}

#[test]
fn no_more_is_plugged_than_is_requested() {
    let mut guest = Guest::new(8 * MIB);
    assert_eq!(guest.ask(PLUG, 0, 5), NACK);
    assert_eq!(guest.ask(PLUG, 0, 4), ACK);
    assert_eq!(guest.ask(PLUG, 4, 1), NACK);
    guest.resize.request(4 * MIB).unwrap();
    assert_eq!(guest.ask(PLUG, 4, 1), NACK, "more is plugged than is requested");
    assert_eq!(guest.ask(UNPLUG, 0, 3), ACK);
    assert_eq!(guest.ask(PLUG, 100, 1), ACK);
    assert_eq!(guest.host.calls().len(), 3);
    assert_eq!(guest.counted("plug", "nack"), 3);
}

#[test]
fn a_block_is_marked_after_the_host_has_done_its_part() {
    let mut guest = Guest::new(REGION);
    assert_eq!(guest.ask(PLUG, 0, 2), ACK);
    assert_eq!(guest.ask(PLUG, 8, 1), ACK);
    assert_eq!(guest.ask(UNPLUG, 0, 1), ACK);
    assert_eq!(guest.ask(UNPLUG_ALL, 0, 0), ACK);
    let calls = [
        call("plug", 0, 2, 0),
        call("plug", 8, 1, 2 * BLOCK),
        call("unplug", 0, 1, 3 * BLOCK),
        call("unplug", 1, 1, 2 * BLOCK),
        call("unplug", 8, 1, BLOCK),
    ];
    assert_eq!(guest.host.calls(), calls);
}

#[test]
fn what_the_host_refuses_changes_nothing_and_may_be_tried_again() {
    let mut guest = Guest::new(REGION);
    assert_eq!(guest.ask(PLUG, 0, 2), ACK);
    guest.host.refuse_after(0);
    assert_eq!(guest.ask(PLUG, 4, 2), BUSY);
    assert_eq!((guest.state(4, 2), guest.sizes()[1]), (1, 4));
    assert_eq!(guest.ask(UNPLUG, 0, 2), BUSY);
    assert_eq!((guest.state(0, 2), guest.sizes()[1]), (0, 4));
    guest.host.refuse_after(None);
    assert_eq!(guest.ask(PLUG, 4, 2), ACK);
    // Of two runs the host takes one back: that one is the host's, the other still the guest's.
    guest.host.refuse_after(1);
    assert_eq!(guest.ask(UNPLUG_ALL, 0, 0), BUSY);
    assert_eq!((guest.state(0, 2), guest.state(4, 2), guest.sizes()[1]), (1, 0, 4));
    guest.host.refuse_after(None);
    assert_eq!(guest.ask(UNPLUG_ALL, 0, 0), ACK);
    assert_eq!(guest.sizes()[1], 0);
    assert_eq!(
        (guest.counted("plug", "busy"), guest.counted("unplug-all", "busy")),
        (1, 1)
    );
}

#[test]
fn what_is_no_request_or_has_no_room_for_an_answer_does_nothing() {
    let mut guest = Guest::new(REGION);
    let whole = request(PLUG, START, 1);
    assert_eq!(guest.raw(&whole[..23], &[10]).0, 0);
    assert_eq!(guest.raw(&whole, &[9]).0, 0);
    assert_eq!(guest.host.calls(), []);
    let refused = guest.registry.samples().into_iter();
    let refused: Vec<u64> = refused
        .filter(|s| s.name == "mem_refused_chains_total")
        .map(|s| s.value)
        .collect();
    assert_eq!(refused, [2]);
    // In pieces, with more behind: what counts is there.
    let longer = [&whole[..], &[0xff; 8]].concat();
    let pushed = guest.driver.push(0, &[&longer[..7], &longer[7..]], &[3, 20]);
    guest.driver.kick(0);
    assert_eq!(guest.driver.wait_used(0).unwrap().written, 10);
    assert_eq!(guest.driver.bytes(pushed.writable[0]), [ACK, 0, 0]);
    assert_eq!(guest.host.calls(), [call("plug", 0, 1, 0)]);
}

/// Numbers that look random, and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// What the specification says, block by block.
struct Model {
    plugged: Vec<bool>,
    requested: u64,
    usable: u64,
}

impl Model {
    const BLOCKS: u64 = REGION / BLOCK;

    fn usable(requested: u64) -> u64 {
        if requested == 0 {
            0
        } else {
            (requested + 128).min(Self::BLOCKS)
        }
    }

    fn count(&self) -> u64 {
        self.plugged.iter().filter(|plugged| **plugged).count() as u64
    }

    fn resize(&mut self, blocks: u64) {
        self.requested = blocks;
        self.usable = self.usable.max(Self::usable(blocks));
    }

    fn answer(&mut self, kind: u16, first: u64, blocks: u64, host_refuses: bool) -> u8 {
        if kind == UNPLUG_ALL {
            if host_refuses && self.count() > 0 {
                return BUSY;
            }
            self.plugged.fill(false);
            self.usable = Self::usable(self.requested);
            return ACK;
        }
        if blocks == 0 || first + blocks > self.usable {
            return ERROR;
        }
        let place = usize::try_from(first).unwrap()..usize::try_from(first + blocks).unwrap();
        if self.plugged[place.clone()].contains(&(kind == PLUG)) {
            return ERROR;
        }
        if kind == PLUG && self.count() + blocks > self.requested {
            return NACK;
        }
        if host_refuses {
            return BUSY;
        }
        self.plugged[place].fill(kind == PLUG);
        ACK
    }
}

#[test]
fn any_sequence_is_answered_as_the_specification_says_and_the_host_owns_the_rest() {
    let mut numbers = Numbers(7);
    let mut guest = Guest::new(0);
    let mut model = Model {
        plugged: vec![false; usize::try_from(Model::BLOCKS).unwrap()],
        requested: 0,
        usable: 0,
    };
    // What the host has been asked to make ready, by its own account.
    let mut ready = model.plugged.clone();
    let mut answers = [0; 4];
    for step in 0..4000 {
        if numbers.below(20) == 0 {
            let blocks = numbers.below(Model::BLOCKS + 1);
            guest.resize.request(blocks * BLOCK).unwrap();
            model.resize(blocks);
        }
        let kind = [PLUG, PLUG, PLUG, UNPLUG, UNPLUG, UNPLUG_ALL][usize::try_from(numbers.below(6)).unwrap()];
        // Rarely, or there would never be much to unplug.
        let kind = if kind == UNPLUG_ALL && numbers.below(10) > 0 {
            UNPLUG
        } else {
            kind
        };
        let (first, blocks) = (numbers.below(Model::BLOCKS + 4), numbers.below(9));
        let refuses = numbers.below(8) == 0;
        guest.host.refuse_after(refuses.then_some(0));
        let expected = model.answer(kind, first, blocks, refuses);
        let answer = guest.ask(kind, first, u16::try_from(blocks).unwrap());
        assert_eq!(answer, expected, "step {step}: {kind} of {blocks} from {first}");
        answers[usize::from(answer)] += 1;
        for Call { verb, run, .. } in guest.host.calls() {
            let place = usize::try_from((run.start - START) / BLOCK).unwrap();
            let run = &mut ready[place..place + usize::try_from(run.length / BLOCK).unwrap()];
            assert!(
                run.iter().all(|ready| *ready == (verb == "unplug")),
                "step {step}: {verb}"
            );
            run.fill(verb == "plug");
        }
        assert_eq!(ready, model.plugged, "step {step}");
        let sizes = [model.usable, model.count(), model.requested].map(|blocks| blocks * 2);
        assert_eq!(guest.sizes(), sizes, "step {step}");
    }
    assert!(answers.iter().all(|count| *count > 50), "{answers:?}");
}
