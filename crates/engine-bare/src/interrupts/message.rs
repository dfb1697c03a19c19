//! Who is meant by a message or a command (AMD64 Architecture Programmer's Manual, volume 2, 16.5 and 16.13; PCI 3.0, 6.8). Numbers
//! only.

use engine::MsiMessage;

/// Delivery modes.
const FIXED: u64 = 0;
const LOWEST: u64 = 1;
const NMI: u64 = 4;
const INIT: u64 = 5;
const STARTUP: u64 = 6;

/// Everybody, in a message of 8 bits and in an x2APIC's command.
const ALL_SHORT: u32 = 0xff;
const ALL: u32 = u32::MAX;

/// Of a message's address: a destination is an APIC's id, and not one of its logical names.
const LOGICAL: u64 = 1 << 2;

/// The same of a command.
const LOGICAL_COMMAND: u64 = 1 << 11;

/// A message to a vCPU's APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    destination: u32,
    logical: bool,
    /// One of those that are meant is enough.
    pub(crate) one: bool,
    /// What arrives there.
    pub(crate) vector: u8,
}

impl Message {
    /// What a device has written; `None` for one that names no vector for a program.
    pub(crate) fn of(message: MsiMessage) -> Option<Self> {
        let (address, data) = (message.address, u64::from(message.data));
        let mode = data >> 8 & 7;
        let vector = u8::try_from(data & 0xff).ok()?;
        if !matches!(mode, FIXED | LOWEST) || vector < 32 {
            return None;
        }
        // The id's bits 8 to 14 are where KVM has them (its feature 15), bits 8 to 31 in the upper half of the address too.
        let id = address >> 12 & 0xff | (address >> 5 & 0x7f) << 8 | address >> 32 & 0xffff_ff00;
        Some(Self {
            destination: u32::try_from(id).ok()?,
            logical: address & LOGICAL != 0,
            one: mode == LOWEST,
            vector,
        })
    }

    /// Whether the APIC with this id is meant.
    pub(crate) fn is_for(self, id: u32) -> bool {
        match self.logical {
            false => self.destination == id || self.destination == ALL_SHORT,
            // An x2APIC's logical id: its cluster, and a bit in it. A short destination reaches the first cluster alone.
            true => id < 16 && self.destination & 1 << id != 0,
        }
    }
}

/// What a vCPU has written to its interrupt command register and the module does not do itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// As after power on.
    Init,
    /// Begin at this page.
    Start(u8),
    /// An interrupt that cannot be masked.
    Nmi,
    /// An SMI, or nothing that there is.
    Other(u64),
}

impl Command {
    /// What is commanded.
    pub(crate) fn of(value: u64) -> Self {
        match value >> 8 & 7 {
            INIT => Self::Init,
            NMI => Self::Nmi,
            STARTUP => Self::Start(u8::try_from(value & 0xff).unwrap_or(0)),
            other => Self::Other(other),
        }
    }

    /// Whether the APIC `id` is meant by one who is `own`.
    pub(crate) fn is_for(value: u64, own: u32, id: u32) -> bool {
        let destination = u32::try_from(value >> 32).unwrap_or(ALL);
        match value >> 18 & 3 {
            1 => id == own,
            2 => true,
            3 => id != own,
            _ if destination == ALL => true,
            // A cluster, and bits of sixteen that are in it.
            _ if value & LOGICAL_COMMAND != 0 => id >> 4 == destination >> 16 && destination & 1 << (id & 15) != 0,
            _ => destination == id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(address: u64, data: u32) -> Option<Message> {
        Message::of(MsiMessage { address, data })
    }

    #[test]
    fn messages_name_apics_and_vectors() {
        let plain = message(0xfee0_3000, 0x41).unwrap();
        assert_eq!((plain.vector, plain.one), (0x41, false));
        assert!(plain.is_for(3) && !plain.is_for(2));
        assert!(message(0xfeef_f000, 0x41).unwrap().is_for(2), "everybody");
        let far = message(0xfee0_0020, 0x41).unwrap();
        assert!(far.is_for(0x100) && !far.is_for(0));
        let logical = message(0xfee0_5004, 0x141).unwrap();
        assert!(logical.one && logical.is_for(0) && logical.is_for(2) && !logical.is_for(1));
        assert!(!logical.is_for(16));
        for data in [0x1f, 0x441, 0x541] {
            assert_eq!(message(0xfee0_0000, data), None, "{data:#x}");
        }
    }

    #[test]
    fn commands_reach_whom_they_name() {
        assert_eq!(Command::of(0x4500), Command::Init);
        assert_eq!(Command::of(0x46_9a), Command::Start(0x9a));
        assert_eq!(
            (Command::of(0x400), Command::of(0x200)),
            (Command::Nmi, Command::Other(2))
        );
        assert!(Command::is_for(5 << 32, 0, 5) && !Command::is_for(5 << 32, 0, 4));
        assert!(Command::is_for(3 << 18, 0, 5) && !Command::is_for(3 << 18, 5, 5));
        assert!(Command::is_for(1 << 18, 5, 5) && !Command::is_for(1 << 18, 0, 5));
        assert!(Command::is_for(2 << 18, 0, 0));
        let logical = |destination: u64, id| Command::is_for(destination << 32 | 0xc00, 0, id);
        assert!(logical(0x2_0008, 35) && !logical(0x2_0008, 8) && !logical(8, 8) && logical(8, 3));
    }
}
