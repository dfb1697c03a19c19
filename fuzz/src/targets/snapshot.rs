//! Snapshots' state files: the container, and what is in its sections. Checksums are set right after a mutation, or nothing
//! behind them would ever be reached.

use machine::{MachineState, Shape};
use state::{Container, Fingerprint, HEADER, Saved, Scan, Sums};
use virtio::{DeviceState, TransportState};

use crate::run::{Target, outcome};

/// Where the header has its numbers.
const TABLE_LENGTH: usize = 20;
const FILE_LENGTH: usize = 24;
const TABLE_CRC: usize = HEADER - 8;
const HEADER_CRC: usize = HEADER - 4;

/// The bytes of a container, with header and table sealed again.
pub(crate) fn container() -> Target {
    Target {
        name: "snapshot-container",
        seeds: vec![file().to_bytes().unwrap_or_default(), Vec::new()],
        parse: |input| {
            let mut bytes = input.to_vec();
            seal(&mut bytes);
            let ends = [&input, &&bytes[..]].map(|bytes| match Container::parse(bytes) {
                Ok(container) => {
                    // What was read is written as it was.
                    assert!(
                        container.to_bytes().is_ok_and(|written| written == *bytes),
                        "another file"
                    );
                    "container".to_owned()
                }
                Err(error) => kind(&error),
            });
            outcome(ends.concat())
        },
    }
}

/// The checksums of a file, sealed again.
pub(crate) fn checksums() -> Target {
    Target {
        name: "snapshot-checksums",
        seeds: vec![
            include_bytes!("../../../crates/state/golden/checksums-v1.bin").to_vec(),
            Vec::new(),
        ],
        parse: |input| {
            let mut bytes = input.to_vec();
            if let Some((body, sum)) = bytes.split_last_chunk_mut::<4>() {
                *sum = crc32fast::hash(body).to_le_bytes();
            }
            outcome(match Sums::parse(&bytes) {
                Ok(sums) => {
                    assert!(sums.to_bytes() == bytes, "other checksums");
                    // As if the file had become empty.
                    format!("{}", sums.differences(&Scan::default()).len())
                }
                Err(error) => kind(&error),
            })
        },
    }
}

/// A section's number, and a payload for it.
pub(crate) fn sections() -> Target {
    let saved = sections_of(&file());
    let seeds = (0_u8..)
        .zip(&saved)
        .map(|(number, (_, saved))| [&[number], &saved.payload[..]].concat());
    Target {
        name: "snapshot-sections",
        seeds: seeds.collect(),
        parse: section,
    }
}

fn section(input: &[u8]) -> u64 {
    let Some((&number, payload)) = input.split_first() else {
        return outcome("nothing");
    };
    let mut sections = sections_of(&file());
    let place = usize::from(number) % sections.len();
    sections[place].1.payload = payload.to_vec();
    let mut container = Container::new(Fingerprint::default());
    for (component, saved) in sections {
        container.put_saved(&component, saved).expect("each is there once");
    }
    let parsed = container.to_bytes().map(|bytes| snapshot::parse_state(&bytes));
    outcome(match parsed {
        Ok(Ok(state)) => format!("{place} {}", state.vcpus.len()),
        Ok(Err(error)) => format!("{place} {}", kind(&error)),
        Err(error) => kind(&error),
    })
}

/// The first words of an error: numbers and names in it would make each one different.
fn kind(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    text.split_whitespace().take(4).collect()
}

fn seal(bytes: &mut [u8]) {
    if bytes.len() < HEADER {
        return;
    }
    let length = (bytes.len() as u64).to_le_bytes();
    bytes[FILE_LENGTH..FILE_LENGTH + 8].copy_from_slice(&length);
    let table = bytes[TABLE_LENGTH..TABLE_LENGTH + 4]
        .try_into()
        .map_or(0, u32::from_le_bytes);
    if let Some(rows) = bytes.get(HEADER..HEADER.saturating_add(table as usize)) {
        let sum = crc32fast::hash(rows);
        bytes[TABLE_CRC..HEADER_CRC].copy_from_slice(&sum.to_le_bytes());
    }
    let sum = crc32fast::hash(&bytes[..HEADER_CRC]);
    bytes[HEADER_CRC..HEADER].copy_from_slice(&sum.to_le_bytes());
}

/// The parts that `snapshot` looks for, by their names.
const COMPONENTS: [&str; 8] = [
    "memory",
    "machine",
    "vm",
    "platform",
    "pci",
    "vcpu0",
    "device/rng",
    "device/rng/own",
];

fn sections_of(container: &Container) -> Vec<(String, Saved)> {
    let mut container = container.clone();
    let mut take = |name: &str| container.take_saved(name).ok().map(|saved| (name.to_owned(), saved));
    COMPONENTS.iter().filter_map(|name| take(name)).collect()
}

/// A small machine's file.
fn file() -> Container {
    let own = Saved {
        kind: "rng".into(),
        version: 1,
        payload: b"{}".to_vec(),
    };
    let machine = MachineState {
        shape: Shape {
            cpus: 1,
            memory: 32 << 20,
            hotplug_memory: 0,
            hotplug_region: 0,
            devices: vec!["rng".into()],
            cpu: engine::CpuModel::Host,
        },
        vcpus: vec![engine::VcpuState::default()],
        devices: vec![DeviceState {
            transport: TransportState::default(),
            own,
        }],
        ..MachineState::default()
    };
    snapshot::to_container(&machine, Fingerprint::default()).expect("a machine that has a form")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_good() {
        let bytes = file().to_bytes().unwrap();
        assert!(snapshot::parse_state(&bytes).is_ok());
        assert_eq!(sections_of(&file()).len(), COMPONENTS.len());
        let mut changed = bytes.clone();
        changed[40] ^= 1;
        assert!(Container::parse(&changed).is_err());
        seal(&mut changed);
        assert!(Container::parse(&changed).is_ok());
    }
}
