//! The container file: a fixed raw header, a table of sections, their payloads one after the other. All numbers are
//! little-endian. Whoever reads one cannot trust a byte of it; checksums find damage, not malice.
//!
//! ```text
//!   0  8  "BSLTSNAP"                    32   8  fingerprint: CPUID
//!   8  4  format                        40   8  fingerprint: engine's capabilities
//!  12  4  length of this header         48  64  fingerprint: kernel, padded with zeroes
//!  16  4  number of sections           112  32  fingerprint: VMM, padded with zeroes
//!  20  4  bytes of the table           144   4  CRC-32 of the table
//!  24  8  bytes of the file            148   4  CRC-32 of the 148 bytes before
//! a section's row: 2 component's length, component, 2 kind's length, kind, 4 version, 8 payload's length, 4 its CRC-32
//! ```

use crate::StateError;
use crate::schema::{Saved, Schema};

const MAGIC: &[u8; 8] = b"BSLTSNAP";

/// The version of the container, not of what is in it.
pub const FORMAT: u32 = 1;

/// Bytes of the header.
pub const HEADER: usize = 152;
const HEADER_CRC: usize = HEADER - 4;
const TABLE_CRC: usize = HEADER_CRC - 4;
const KERNEL: usize = 64;
const VMM: usize = 32;

/// The most of each. A machine has 64 vCPUs, 31 devices and a handful of other parts.
const MAX_FILE: usize = 64 << 20;
const MAX_SECTIONS: usize = 1024;
const MAX_NAME: usize = 4096;

/// What must be alike where a snapshot is taken and where it is restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint {
    /// A hash over what CPUID offers guests.
    pub cpuid: u64,
    /// What the engine can do, a bit each.
    pub capabilities: u64,
    /// The host kernel's release, cut to 64 bytes.
    pub kernel: String,
    /// The VMM's version, cut to 32 bytes.
    pub vmm: String,
}

impl Fingerprint {
    /// Whether a snapshot with this fingerprint can be restored where `here` is.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, here: &Self) -> Result<(), StateError> {
        self.check_vmm(here)?;
        let hash = |value: u64| format!("{value:016x}");
        let differences = [
            ("host kernel", self.kernel.clone(), here.kernel.clone()),
            ("set of CPU features", hash(self.cpuid), hash(here.cpuid)),
            (
                "set of KVM's capabilities",
                hash(self.capabilities),
                hash(here.capabilities),
            ),
        ];
        match differences.into_iter().find(|(_, saved, here)| saved != here) {
            Some((what, saved, here)) => Err(StateError::Fingerprint { what, saved, here }),
            None => Ok(()),
        }
    }

    /// The same for a VM that was shown a CPU model: hosts may differ in what it does not depend on. What CPUID says is compared
    /// leaf by leaf by whoever knows it, and `asked_elsewhere` are capabilities for which somebody else asks where they are needed.
    ///
    /// # Errors
    /// Another VMM, or an engine that lacks something.
    pub fn check_portable(&self, here: &Self, asked_elsewhere: u64) -> Result<(), StateError> {
        self.check_vmm(here)?;
        let lacks = self.capabilities & !here.capabilities & !asked_elsewhere;
        match lacks {
            0 => Ok(()),
            lacks => Err(StateError::Capabilities(lacks)),
        }
    }

    /// Whether both are of the same VMM. Until that is known nothing else of a snapshot is worth being read.
    ///
    /// # Errors
    /// They are not.
    pub fn check_vmm(&self, here: &Self) -> Result<(), StateError> {
        let differs = |saved: &str, here: &str| StateError::Fingerprint {
            what: "VMM",
            saved: saved.to_owned(),
            here: here.to_owned(),
        };
        (self.vmm == here.vmm)
            .then_some(())
            .ok_or_else(|| differs(&self.vmm, &here.vmm))
    }

    fn write(&self, header: &mut Vec<u8>) {
        header.extend(self.cpuid.to_le_bytes());
        header.extend(self.capabilities.to_le_bytes());
        for (text, width) in [(&self.kernel, KERNEL), (&self.vmm, VMM)] {
            let text = &text[..text.floor_char_boundary(width)];
            header.extend(text.bytes().chain(std::iter::repeat(0)).take(width));
        }
    }

    fn read(input: &mut Input<'_>) -> Option<Self> {
        Some(Self {
            cpuid: input.u64()?,
            capabilities: input.u64()?,
            kernel: input.padded(KERNEL)?,
            vmm: input.padded(VMM)?,
        })
    }
}

/// Everything in one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    /// Where it can be restored.
    pub fingerprint: Fingerprint,
    sections: Vec<(String, Saved)>,
}

/// The bytes not read yet.
struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn name(&mut self) -> Option<String> {
        let length = usize::from(self.u16()?);
        text(self.take(length)?).filter(|name| name.len() <= MAX_NAME)
    }

    /// Text with nothing but zeroes behind it.
    fn padded(&mut self, width: usize) -> Option<String> {
        let bytes = self.take(width)?;
        let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        text(&bytes[..end])
    }
}

/// Text that may stand in a message: a file can be anybody's, a terminal is somebody's.
fn text(bytes: &[u8]) -> Option<String> {
    let text = str::from_utf8(bytes).ok()?;
    (!text.contains(char::is_control)).then(|| text.to_owned())
}

struct Row {
    component: String,
    kind: String,
    version: u32,
    length: usize,
    checksum: u32,
}

impl Row {
    fn read(input: &mut Input<'_>) -> Option<Self> {
        Some(Self {
            component: input.name()?,
            kind: input.name()?,
            version: input.u32()?,
            length: usize::try_from(input.u64()?).ok()?,
            checksum: input.u32()?,
        })
    }
}

/// The header's numbers, after its own checksum was found right.
struct Header {
    sections: usize,
    table: usize,
    table_checksum: u32,
    fingerprint: Fingerprint,
}

impl Header {
    fn read(bytes: &[u8]) -> Result<Self, StateError> {
        let mut input = Input { bytes, at: 0 };
        if input.take(MAGIC.len()) != Some(MAGIC) {
            return Err(StateError::NoSnapshot);
        }
        let short = || length(HEADER as u64, bytes.len());
        let format = input.u32().ok_or_else(short)?;
        if format != FORMAT {
            return Err(StateError::Format { found: format });
        }
        let header = bytes.get(..HEADER).ok_or_else(short)?;
        let mut end = Input {
            bytes: header,
            at: HEADER_CRC,
        };
        check("the header", &header[..HEADER_CRC], end.u32().ok_or_else(short)?)?;
        let read = |input: &mut Input<'_>| {
            let length = input.u32()?;
            let (sections, table, total) = (input.u32()?, input.u32()?, input.u64()?);
            let fingerprint = Fingerprint::read(input)?;
            (usize::try_from(length) == Ok(HEADER)).then_some((sections, table, total, fingerprint))
        };
        let parts = read(&mut input);
        let (sections, table, total, fingerprint) = parts.ok_or(StateError::Header { at: input.at })?;
        let table_checksum = input.u32().ok_or_else(short)?;
        if total != bytes.len() as u64 {
            return Err(length(total, bytes.len()));
        }
        let usize = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        limit("number of sections", usize(sections), MAX_SECTIONS)?;
        Ok(Self {
            sections: usize(sections),
            table: usize(table),
            table_checksum,
            fingerprint,
        })
    }
}

fn length(expected: u64, found: usize) -> StateError {
    StateError::Length {
        expected,
        found: found as u64,
    }
}

fn limit(what: &'static str, size: usize, most: usize) -> Result<(), StateError> {
    if size > most {
        return Err(StateError::TooLarge { what, size, most });
    }
    Ok(())
}

fn check(part: &str, bytes: &[u8], expected: u32) -> Result<(), StateError> {
    let found = crc32fast::hash(bytes);
    if found == expected {
        return Ok(());
    }
    Err(StateError::Checksum {
        part: part.to_owned(),
        expected,
        found,
    })
}

impl Container {
    /// One without sections.
    pub fn new(fingerprint: Fingerprint) -> Self {
        Self {
            fingerprint,
            sections: Vec::new(),
        }
    }

    /// The largest file that is a container: whoever reads one need not read more.
    pub const fn max_bytes() -> usize {
        MAX_FILE
    }

    /// Adds a component's state.
    ///
    /// # Errors
    /// It has one already, or the value cannot be written.
    pub fn put<T: Schema>(&mut self, component: &str, value: &T) -> Result<(), StateError> {
        self.put_saved(component, Saved::of(value)?)
    }

    /// The same for state that is saved already.
    ///
    /// # Errors
    /// The component has one already, or its name cannot stand in a file.
    pub fn put_saved(&mut self, component: &str, saved: Saved) -> Result<(), StateError> {
        limit("a component's name", component.len(), MAX_NAME)?;
        if component.contains(char::is_control) {
            return Err(StateError::Name(component.escape_debug().to_string()));
        }
        if self.sections.iter().any(|(name, _)| name == component) {
            return Err(StateError::Twice(component.to_owned()));
        }
        self.sections.push((component.to_owned(), saved));
        Ok(())
    }

    /// Takes a component's state out.
    ///
    /// # Errors
    /// It is not there, is of another kind or version, or damaged.
    pub fn take<T: Schema>(&mut self, component: &str) -> Result<T, StateError> {
        self.take_saved(component)?.read(component)
    }

    /// The same without looking into it.
    ///
    /// # Errors
    /// It is not there.
    pub fn take_saved(&mut self, component: &str) -> Result<Saved, StateError> {
        let place = self.sections.iter().position(|(name, _)| name == component);
        match place {
            Some(place) => Ok(self.sections.remove(place).1),
            None => Err(StateError::Missing(component.escape_debug().to_string())),
        }
    }

    /// All has been taken.
    ///
    /// # Errors
    /// It has not.
    pub fn finish(self) -> Result<(), StateError> {
        match self.sections.into_iter().next() {
            Some((component, _)) => Err(StateError::LeftOver(component)),
            None => Ok(()),
        }
    }

    /// The file.
    ///
    /// # Errors
    /// More than a container can have.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StateError> {
        limit("number of sections", self.sections.len(), MAX_SECTIONS)?;
        let mut table = Vec::new();
        for (component, saved) in &self.sections {
            for name in [component, &saved.kind] {
                limit("a name", name.len(), MAX_NAME)?;
                table.extend(u16::try_from(name.len()).unwrap_or(u16::MAX).to_le_bytes());
                table.extend(name.as_bytes());
            }
            table.extend(saved.version.to_le_bytes());
            table.extend((saved.payload.len() as u64).to_le_bytes());
            table.extend(crc32fast::hash(&saved.payload).to_le_bytes());
        }
        let payloads: usize = self.sections.iter().map(|(_, saved)| saved.payload.len()).sum();
        let total = HEADER + table.len() + payloads;
        limit("a file", total, MAX_FILE)?;
        let u32 = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let mut bytes = MAGIC.to_vec();
        for number in [FORMAT, u32(HEADER), u32(self.sections.len()), u32(table.len())] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend((total as u64).to_le_bytes());
        self.fingerprint.write(&mut bytes);
        debug_assert_eq!(bytes.len(), TABLE_CRC, "the header's layout");
        bytes.extend(crc32fast::hash(&table).to_le_bytes());
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.extend(table);
        for (_, saved) in &self.sections {
            bytes.extend(&saved.payload);
        }
        Ok(bytes)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It is no snapshot, cut short, or damaged.
    pub fn parse(bytes: &[u8]) -> Result<Self, StateError> {
        limit("a file", bytes.len(), MAX_FILE)?;
        let header = Header::read(bytes)?;
        let bad = |at| StateError::Table { at };
        let mut input = Input { bytes, at: HEADER };
        let table = input.take(header.table).ok_or_else(|| bad(HEADER))?;
        check("the section table", table, header.table_checksum)?;
        let mut rows = Input { bytes: table, at: 0 };
        let mut container = Self::new(header.fingerprint);
        for _ in 0..header.sections {
            let at = HEADER + rows.at;
            let row = Row::read(&mut rows).ok_or_else(|| bad(at))?;
            let payload = input.take(row.length).ok_or_else(|| bad(at))?;
            check(&format!("`{}`", row.component), payload, row.checksum)?;
            let saved = Saved {
                kind: row.kind,
                version: row.version,
                payload: payload.to_vec(),
            };
            container.put_saved(&row.component, saved)?;
        }
        if rows.at != table.len() || input.at != bytes.len() {
            return Err(bad(HEADER + rows.at));
        }
        Ok(container)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Lamp {
        on: bool,
    }

    impl Schema for Lamp {
        const KIND: &'static str = "lamp";
        const VERSION: u32 = 3;
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Clock {
        ticks: u64,
    }

    impl Schema for Clock {
        const KIND: &'static str = "clock";
        const VERSION: u32 = 1;
    }

    fn container() -> Container {
        let mut container = Container::new(Fingerprint {
            cpuid: 0x1122_3344_5566_7788,
            capabilities: 0b1011,
            kernel: "6.1.0".into(),
            vmm: "0.1.0".into(),
        });
        container.put("hall", &Lamp { on: true }).unwrap();
        container.put("wall", &Clock { ticks: 7 }).unwrap();
        container
    }

    #[test]
    fn what_was_put_in_comes_out_once() {
        let mut read = Container::parse(&container().to_bytes().unwrap()).unwrap();
        assert_eq!(read, container());
        assert_eq!(read.take::<Clock>("wall").unwrap(), Clock { ticks: 7 });
        assert!(matches!(read.take::<Clock>("wall"), Err(StateError::Missing(_))));
        assert!(matches!(read.clone().finish(), Err(StateError::LeftOver(name)) if name == "hall"));
        assert!(matches!(
            read.clone().take::<Clock>("hall"),
            Err(StateError::Kind { .. })
        ));
        assert!(matches!(
            read.put("hall", &Lamp { on: false }),
            Err(StateError::Twice(_))
        ));
        assert_eq!(read.take::<Lamp>("hall").unwrap(), Lamp { on: true });
        read.finish().unwrap();
    }

    #[test]
    fn the_format_is_that_of_the_golden_file() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/container-v1.bin");
        if std::env::var_os("BASALT_WRITE_GOLDEN").is_some() && !golden.exists() {
            std::fs::write(&golden, container().to_bytes().unwrap()).unwrap();
        }
        let bytes = std::fs::read(golden).unwrap();
        assert_eq!(Container::parse(&bytes).unwrap(), container());
        assert_eq!(container().to_bytes().unwrap(), bytes);
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_found() {
        let bytes = container().to_bytes().unwrap();
        for end in 0..bytes.len() {
            assert!(Container::parse(&bytes[..end]).is_err(), "cut at {end}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(matches!(Container::parse(&longer), Err(StateError::Length { .. })));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(Container::parse(&changed).is_err(), "byte {at}");
        }
    }

    /// Checksums set right again: what is left to find is what contradicts itself.
    fn forge(change: impl FnOnce(&mut Vec<u8>)) -> Result<Container, StateError> {
        let mut bytes = container().to_bytes().unwrap();
        change(&mut bytes);
        let table = u32::from_le_bytes(bytes[20..24].try_into().unwrap()) as usize;
        if let Some(rows) = bytes.get(HEADER..HEADER + table) {
            let sum = crc32fast::hash(rows).to_le_bytes();
            bytes[TABLE_CRC..HEADER_CRC].copy_from_slice(&sum);
        }
        let sum = crc32fast::hash(&bytes[..HEADER_CRC]).to_le_bytes();
        bytes[HEADER_CRC..HEADER].copy_from_slice(&sum);
        Container::parse(&bytes)
    }

    #[test]
    fn a_forged_table_is_found() {
        assert!(forge(|_| ()).is_ok());
        assert!(matches!(forge(|b| b[8] = 9), Err(StateError::Format { found: 9 })));
        assert!(matches!(forge(|b| b[16] = 1), Err(StateError::Table { .. })));
        assert!(matches!(forge(|b| b[16] = 3), Err(StateError::Table { .. })));
        assert!(matches!(forge(|b| b[19] = 1), Err(StateError::TooLarge { .. })));
        assert!(matches!(forge(|b| b[23] = 0xff), Err(StateError::Table { .. })));
        // The first row's payload length, as large as can be.
        let length_at = HEADER + 2 + 4 + 2 + 4 + 4;
        let huge = forge(|b| b[length_at..length_at + 8].fill(0xff));
        assert!(matches!(huge, Err(StateError::Table { .. })));
        assert!(matches!(forge(|b| b[HEADER] = 0xff), Err(StateError::Table { .. })));
        let same = forge(|b| {
            let row = 2 + 4 + 2 + 4 + 4 + 8 + 4;
            b.copy_within(HEADER + 2..HEADER + 6, HEADER + row + 2);
        });
        assert!(matches!(same, Err(StateError::Twice(_))));
    }

    #[test]
    fn what_could_be_written_otherwise_is_refused() {
        let header = |result| matches!(result, Err(StateError::Header { .. }));
        assert!(header(forge(|b| b[12] = 0)), "another length of the header");
        assert!(header(forge(|b| b[48] = 0)), "text behind a zero");
        assert!(header(forge(|b| b[49] = 0x1b)), "what a terminal would obey");
        assert!(header(forge(|b| b[112] = 0xff)), "not UTF-8");
        let name = forge(|b| b[HEADER + 2] = 0x1b);
        assert!(matches!(name, Err(StateError::Table { at: HEADER })));
        let mut container = container();
        let error = container.put("\u{1b}[2J", &Lamp { on: true }).unwrap_err();
        assert!(error.to_string().contains("`\\u{1b}[2J`"), "{error}");
        let error = container.take::<Lamp>("\u{1b}[2J").unwrap_err();
        assert!(error.to_string().contains("`\\u{1b}[2J`"), "{error}");
        // A text that is too long is cut between two characters.
        container.fingerprint.vmm = "a".repeat(31) + "é";
        let read = Container::parse(&container.to_bytes().unwrap()).unwrap();
        assert_eq!(read.fingerprint.vmm, "a".repeat(31));
    }

    #[test]
    fn each_difference_of_fingerprints_is_named() {
        let here = container().fingerprint;
        here.check(&here).unwrap();
        let differs = |change: fn(&mut Fingerprint)| {
            let mut other = here.clone();
            change(&mut other);
            other.check(&here).unwrap_err().to_string()
        };
        assert!(differs(|f| f.kernel = "5.4".into()).contains("another host kernel (5.4; here 6.1.0)"));
        assert!(differs(|f| f.vmm = "9".into()).contains("another VMM"));
        assert!(differs(|f| f.cpuid += 1).contains("CPU features"));
        assert!(differs(|f| f.capabilities += 1).contains("capabilities"));
    }

    #[test]
    fn where_a_cpu_model_was_shown_only_what_is_needed_counts() {
        let here = container().fingerprint;
        let differs = |change: fn(&mut Fingerprint)| {
            let mut other = here.clone();
            change(&mut other);
            other.check_portable(&here, 1 << 6).map_err(|error| error.to_string())
        };
        assert_eq!(differs(|f| f.kernel = "5.4".into()), Ok(()));
        assert_eq!(differs(|f| f.cpuid += 1), Ok(()));
        assert_eq!(differs(|f| f.capabilities = 0b10), Ok(()));
        assert_eq!(
            differs(|f| f.capabilities |= 1 << 6),
            Ok(()),
            "somebody else asks for it"
        );
        let lacks = differs(|f| f.capabilities |= 1 << 6 | 0b100).unwrap_err();
        assert!(lacks.contains("KVM lacks capabilities (0x4)"), "{lacks}");
        assert!(
            differs(|f| f.vmm = "9".into())
                .unwrap_err()
                .contains("another VMM (9; here 0.1.0)")
        );
    }

    #[test]
    fn another_version_of_a_schema_is_refused() {
        let mut container = Container::default();
        let saved = Saved {
            version: 4,
            ..Saved::of(&Lamp { on: true }).unwrap()
        };
        container.put_saved("hall", saved).unwrap();
        let error = container.take::<Lamp>("hall").unwrap_err();
        assert!(
            matches!(error, StateError::Version { found: 4, known: 3, .. }),
            "{error}"
        );
    }
}
