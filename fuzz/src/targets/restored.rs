//! A virtio device restored from a forged state: each number of a good one may be another, each list shorter. It is
//! refused, or it is a device like any other: it works, is saved and is reset.
//!
//! Knows the public types of `virtio`, no concrete device.

use std::sync::Arc;

use engine::Vm;
use observe::Registry;
use pci::PciFunction;
use serde_json::Value;
use state::Saved;
use virtio::conformance::driver::Driver;
use virtio::conformance::fakes::FakeVm;
use virtio::{Activation, ActiveQueue, DeviceError, DeviceState, VirtioDevice, VirtioPciDevice};

use crate::run::{Target, outcome};

/// Bytes of one change in the input: which number or list (the highest bit tells), and what it becomes.
const CHANGE: usize = 10;
const LIST: u16 = 1 << 15;

/// More than one would hardly be told from the first.
const CHANGES: usize = 8;

/// A device's state with changes.
pub(crate) fn devices() -> Target {
    let change = |place: u16, value: u64| [&place.to_le_bytes()[..], &value.to_le_bytes()].concat();
    // Beyond configuration space, whose bytes come last and are compared one by one.
    let numbers = (0..120).map(|place| change(place, 0xff));
    let lists = (0..12).map(|place| change(LIST | place, 0));
    Target {
        name: "snapshot-device",
        seeds: [Vec::new()].into_iter().chain(numbers).chain(lists).collect(),
        parse: restore,
    }
}

/// Takes what its driver offers once, and gives its queues back.
#[derive(Default)]
struct Taker(Vec<ActiveQueue>);

impl VirtioDevice for Taker {
    fn device_type(&self) -> u16 {
        4
    }

    fn features(&self) -> u64 {
        0b11
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64, 16]
    }

    fn read_config(&self, _: usize, _: &mut [u8]) {}

    fn write_config(&mut self, _: usize, _: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.0 = activation.queues;
        for active in &mut self.0 {
            while let Ok(Some(taken)) = active.take(&activation.memory) {
                let head = taken.check().map_or_else(|bad| bad.head, |chain| chain.head());
                if active.complete(&activation.memory, head, 0).is_err() {
                    break;
                }
            }
            activation.interrupt.signal_queue(active.index);
        }
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        std::mem::take(&mut self.0)
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        Ok(own())
    }

    fn restore(&mut self, _: &Saved) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn own() -> Saved {
    Saved {
        kind: "taker".into(),
        version: 1,
        payload: Vec::new(),
    }
}

/// The state of one whose driver has set it up, with a buffer in each queue.
fn good() -> Value {
    let mut driver = Driver::new(Box::new(Taker::default()));
    driver.start();
    driver.device().pause();
    let saved = driver.device().save().expect("a device that is paused");
    serde_json::to_value(saved.transport).expect("a state that has a form")
}

/// The number that comes after `left` others; `left` counts down.
fn number<'v>(value: &'v mut Value, left: &mut usize) -> Option<&'v mut Value> {
    match value {
        Value::Number(_) if *left == 0 => Some(value),
        Value::Number(_) => {
            *left -= 1;
            None
        }
        Value::Array(items) => items.iter_mut().find_map(|item| number(item, left)),
        Value::Object(fields) => fields.values_mut().find_map(|field| number(field, left)),
        Value::Null | Value::Bool(_) | Value::String(_) => None,
    }
}

/// The same for lists.
fn list<'v>(value: &'v mut Value, left: &mut usize) -> Option<&'v mut Vec<Value>> {
    match value {
        Value::Array(items) => {
            if *left == 0 {
                return Some(items);
            }
            *left -= 1;
            items.iter_mut().find_map(|item| list(item, left))
        }
        Value::Object(fields) => fields.values_mut().find_map(|field| list(field, left)),
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Number(_) => None,
    }
}

fn change(state: &mut Value, place: u16, to: u64) {
    let mut left = usize::from(place & !LIST);
    if place & LIST == 0 {
        if let Some(number) = number(state, &mut left) {
            *number = to.into();
        }
    } else if let Some(items) = list(state, &mut left) {
        let length = usize::try_from(to).unwrap_or(usize::MAX);
        match items.first().cloned() {
            Some(first) if length > items.len() => items.push(first),
            _ => items.truncate(length),
        }
    }
}

/// How long each list is.
fn shape(value: &Value, lengths: &mut Vec<usize>) {
    match value {
        Value::Array(items) => {
            lengths.push(items.len());
            items.iter().for_each(|item| shape(item, lengths));
        }
        Value::Object(fields) => fields.values().for_each(|field| shape(field, lengths)),
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Number(_) => (),
    }
}

fn restore(input: &[u8]) -> u64 {
    let mut state = good();
    let (mut wanted, mut found) = (Vec::new(), Vec::new());
    shape(&state, &mut wanted);
    for step in input.chunks_exact(CHANGE).take(CHANGES) {
        let (place, to) = (u16::from_le_bytes([step[0], step[1]]), &step[2..]);
        let to = to.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        change(&mut state, place, to);
    }
    shape(&state, &mut found);
    let Ok(transport) = serde_json::from_value(state) else {
        return outcome("no such state");
    };
    let saved = DeviceState { transport, own: own() };
    let driver = Driver::new(Box::new(Taker::default()));
    let vm = Arc::new(FakeVm::default()) as Arc<dyn Vm>;
    let memory = Arc::clone(driver.memory());
    let device = VirtioPciDevice::new("it", Box::new(Taker::default()), vm, memory, &Registry::new());
    let device = device.expect("a device like the one that was saved");
    if let Err(error) = device.restore(&saved) {
        return outcome(error);
    }
    assert_eq!(found, wanted, "lists of other lengths were taken");
    let resumed = device.resume().is_ok();
    for offset in (0..0x8000).step_by(0x40) {
        device.bar_read(0, offset, &mut [0; 4]);
    }
    device.pause();
    let again = device.save().expect("what could be restored can be saved");
    device.reset();
    outcome(format!("{resumed} {}", again == saved))
}
