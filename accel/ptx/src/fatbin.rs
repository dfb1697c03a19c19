//! Fat binaries: what nvcc links into a program, and the PTX in it.
//!
//! The layout is described by public sources only: the wrapper and its sections by clang (`clang/lib/CodeGen/CGCUDANV.cpp` of LLVM),
//! the container's and the entries' headers, their flags and both compressions by ZLUDA's `dark_api` crate and by Cricket's reader
//! (`n-eiling/cuda-fatbin-decompression`); PTX that is compressed is an LZ4 block or a zstd frame. Nothing was found out by taking the
//! maker's programs apart. Machine code for particular GPUs (cubins) is skipped, as nobody here can run it.

use std::io::Read;

use ruzstd::decoding::StreamingDecoder;
use thiserror::Error;

use crate::parse::MAX_TEXT;

/// What a program's wrapper begins with.
pub const WRAPPER_MAGIC: u32 = 0x4662_43b1;
/// How long a wrapper is.
pub const WRAPPER: usize = 24;
/// What a container begins with.
pub const CONTAINER_MAGIC: u32 = 0xba55_ed50;
/// How long a container's header is.
pub const HEADER: usize = 16;
/// No container is longer.
pub const MAX_CONTAINER: u64 = 1 << 30;

/// An entry's header, as far as it is read.
const ENTRY: usize = 64;
const KIND_PTX: u16 = 1;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
/// Compressions that have no public description.
const OTHER_COMPRESSION: u64 = 0x1000;

/// Why there is no PTX to be had.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FatbinError {
    /// It is too short for what it says.
    #[error("the fat binary ends at byte {0}, within what it announces; link the program again")]
    Short(usize),
    /// It begins with something else.
    #[error("no fat binary: it begins with {0:#010x}; link the program with nvcc 12 or 13")]
    Magic(u32),
    /// A version that is not known.
    #[error("version {0} of fat binaries is not known; link the program with nvcc 12 or 13")]
    Version(u32),
    /// More bytes than are read.
    #[error("{0} bytes announced, {1} are allowed; divide the module")]
    Large(u64, u64),
    /// A compression that has no public description.
    #[error("PTX compressed in a way that is not known (flags {0:#x}); link with nvcc's --no-compress")]
    Compression(u64),
    /// What was compressed cannot be had again.
    #[error("compressed PTX is damaged: {0}; link the program again, with nvcc's --no-compress if that does not help")]
    Damaged(&'static str),
    /// The text has bytes that no PTX has.
    #[error("the PTX is not text; link the program again")]
    NoText,
    /// There is machine code only, or nothing.
    #[error("the fat binary has no PTX; compile with -gencode arch=compute_75,code=compute_75, say")]
    NoPtx,
    /// It is no program of 64 bits.
    #[error("no ELF file of 64 bits with a section {0}; link the program with nvcc 12 or 13")]
    NoSection(&'static str),
}

/// The PTX of one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ptx {
    /// The compute capability that it was made for: 75 for `compute_75`.
    pub target: u32,
    /// The text, without the zero bytes that end it.
    pub text: String,
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Result<[u8; N], FatbinError> {
    let end = at.checked_add(N).ok_or(FatbinError::Short(from.len()))?;
    let part = from.get(at..end).ok_or(FatbinError::Short(from.len()))?;
    part.try_into().map_err(|_| FatbinError::Short(from.len()))
}

fn u16_at(from: &[u8], at: usize) -> Result<u16, FatbinError> {
    Ok(u16::from_le_bytes(bytes(from, at)?))
}

fn u32_at(from: &[u8], at: usize) -> Result<u32, FatbinError> {
    Ok(u32::from_le_bytes(bytes(from, at)?))
}

fn u64_at(from: &[u8], at: usize) -> Result<u64, FatbinError> {
    Ok(u64::from_le_bytes(bytes(from, at)?))
}

/// The address of the container that a wrapper points to: what a program hands over when it registers its kernels.
///
/// # Errors
///
/// It is no wrapper, or one of another version.
pub fn wrapped(wrapper: &[u8]) -> Result<u64, FatbinError> {
    let magic = u32_at(wrapper, 0)?;
    if magic != WRAPPER_MAGIC {
        return Err(FatbinError::Magic(magic));
    }
    match u32_at(wrapper, 4)? {
        1 | 2 => u64_at(wrapper, 8),
        other => Err(FatbinError::Version(other)),
    }
}

/// How long a container is, header and all, from its first [`HEADER`] bytes.
///
/// # Errors
///
/// It is no container, or longer than any is.
pub fn container_size(header: &[u8]) -> Result<u64, FatbinError> {
    let magic = u32_at(header, 0)?;
    if magic != CONTAINER_MAGIC {
        return Err(FatbinError::Magic(magic));
    }
    let version = u16_at(header, 4)?;
    if version != 1 {
        return Err(FatbinError::Version(version.into()));
    }
    let begin = u64::from(u16_at(header, 6)?);
    let size = u64_at(header, 8)?.saturating_add(begin);
    if begin < HEADER as u64 {
        return Err(FatbinError::Short(HEADER));
    }
    if size > MAX_CONTAINER {
        return Err(FatbinError::Large(size, MAX_CONTAINER));
    }
    Ok(size)
}

/// All PTX of a container, or of several, one after the other, as a program's section has them.
///
/// # Errors
///
/// It is no container, damaged, compressed in a way that is not known, or has no PTX.
pub fn ptx(mut containers: &[u8]) -> Result<Vec<Ptx>, FatbinError> {
    let mut found = Vec::new();
    let mut total = 0;
    while containers.len() >= HEADER {
        if !found.is_empty() && containers.iter().all(|&byte| byte == 0) {
            break;
        }
        let size = container_size(containers)?;
        let size = usize::try_from(size).map_err(|_| FatbinError::Large(size, MAX_CONTAINER))?;
        let begin = usize::from(u16_at(containers, 6)?);
        let entries = containers
            .get(begin..size)
            .ok_or(FatbinError::Short(containers.len()))?;
        read_entries(entries, &mut total, &mut found)?;
        containers = &containers[size..];
    }
    if found.is_empty() {
        return Err(if containers.is_empty() {
            FatbinError::NoPtx
        } else {
            FatbinError::Short(containers.len())
        });
    }
    Ok(found)
}

fn read_entries(mut entries: &[u8], total: &mut u64, found: &mut Vec<Ptx>) -> Result<(), FatbinError> {
    while !entries.is_empty() {
        let header = u32_at(entries, 4)? as usize;
        let size = u64_at(entries, 8)?;
        if header < ENTRY {
            return Err(FatbinError::Short(header));
        }
        let size = usize::try_from(size).map_err(|_| FatbinError::Large(size, MAX_CONTAINER))?;
        let end = header.checked_add(size).ok_or(FatbinError::Short(entries.len()))?;
        let payload = entries.get(header..end).ok_or(FatbinError::Short(entries.len()))?;
        if u16_at(entries, 0)? == KIND_PTX {
            let text = read_ptx(entries, payload)?;
            *total += text.len() as u64;
            if *total > MAX_TEXT as u64 {
                return Err(FatbinError::Large(*total, MAX_TEXT as u64));
            }
            found.push(Ptx {
                target: u32_at(entries, 28)?,
                text,
            });
        }
        entries = &entries[end..];
    }
    Ok(())
}

fn read_ptx(header: &[u8], payload: &[u8]) -> Result<String, FatbinError> {
    let flags = u64_at(header, 40)?;
    let compressed = u32_at(header, 16)? as usize;
    let size = u64_at(header, 56)?;
    if flags & (LZ4 | ZSTD) != 0 && size > MAX_TEXT as u64 {
        return Err(FatbinError::Large(size, MAX_TEXT as u64));
    }
    let room = usize::try_from(size).unwrap_or(MAX_TEXT);
    let text = if flags & OTHER_COMPRESSION != 0 {
        return Err(FatbinError::Compression(flags));
    } else if flags & LZ4 != 0 {
        lz4(
            payload.get(..compressed).ok_or(FatbinError::Short(payload.len()))?,
            room,
        )?
    } else if flags & ZSTD != 0 {
        zstd(
            payload.get(..compressed).ok_or(FatbinError::Short(payload.len()))?,
            room,
        )?
    } else {
        payload.to_vec()
    };
    let mut text = String::from_utf8(text).map_err(|_| FatbinError::NoText)?;
    text.truncate(text.trim_end_matches('\0').len());
    Ok(text)
}

fn zstd(compressed: &[u8], size: usize) -> Result<Vec<u8>, FatbinError> {
    let damaged = || FatbinError::Damaged("its zstd frame cannot be read");
    let decoder = StreamingDecoder::new(compressed).map_err(|_| damaged())?;
    let mut text = Vec::new();
    let limit = size as u64 + 1;
    decoder.take(limit).read_to_end(&mut text).map_err(|_| damaged())?;
    if text.len() != size {
        return Err(FatbinError::Damaged("it is not as long as its header says"));
    }
    Ok(text)
}

/// An LZ4 block, as LZ4's block format describes it.
fn lz4(mut from: &[u8], size: usize) -> Result<Vec<u8>, FatbinError> {
    let mut text = Vec::new();
    loop {
        let token = take(&mut from, 1)?[0];
        let literals = length(&mut from, token >> 4)?;
        text.extend_from_slice(take(&mut from, literals)?);
        if from.is_empty() {
            break;
        }
        let offset = usize::from(u16_at(take(&mut from, 2)?, 0)?);
        let copied = length(&mut from, token & 15)? + 4;
        let start = text.len().checked_sub(offset).filter(|_| offset != 0);
        let start = start.ok_or(FatbinError::Damaged("it repeats what is before its beginning"))?;
        if text.len() + copied > size {
            return Err(FatbinError::Damaged("it is longer than its header says"));
        }
        // What is repeated may overlap what is being written.
        for at in start..start + copied {
            text.push(text[at]);
        }
    }
    if text.len() != size {
        return Err(FatbinError::Damaged("it is not as long as its header says"));
    }
    Ok(text)
}

fn take<'a>(from: &mut &'a [u8], count: usize) -> Result<&'a [u8], FatbinError> {
    let (part, rest) = from
        .split_at_checked(count)
        .ok_or(FatbinError::Damaged("it ends within a sequence"))?;
    *from = rest;
    Ok(part)
}

/// A length whose first part is in the token.
fn length(from: &mut &[u8], first: u8) -> Result<usize, FatbinError> {
    let mut length = usize::from(first);
    if first == 15 {
        loop {
            let more = take(from, 1)?[0];
            length += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    Ok(length)
}

/// The section in which nvcc puts containers, of an ELF file of 64 bits: a program, a library or an object.
///
/// # Errors
///
/// It is no such file, or has no such section.
pub fn section(elf: &[u8]) -> Result<&[u8], FatbinError> {
    const NAME: &str = ".nv_fatbin";
    find_section(elf, NAME).ok_or(FatbinError::NoSection(NAME))
}

fn find_section<'a>(elf: &'a [u8], name: &str) -> Option<&'a [u8]> {
    // ELF, 64 bits, little-endian.
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = usize::try_from(u64_at(elf, 0x28).ok()?).ok()?;
    let entry = usize::from(u16_at(elf, 0x3a).ok()?);
    let count = usize::from(u16_at(elf, 0x3c).ok()?);
    let names = usize::from(u16_at(elf, 0x3e).ok()?);
    let header = |index: usize| {
        let start = table.checked_add(index.checked_mul(entry)?)?;
        elf.get(start..start.checked_add(64)?)
    };
    let contents = |header: &[u8]| {
        let start = usize::try_from(u64_at(header, 0x18).ok()?).ok()?;
        let size = usize::try_from(u64_at(header, 0x20).ok()?).ok()?;
        elf.get(start..start.checked_add(size)?)
    };
    let names = contents(header(names)?)?;
    for index in 0..count {
        let header = header(index)?;
        let own = names.get(u32_at(header, 0).ok()? as usize..)?;
        let end = own.iter().position(|&byte| byte == 0)?;
        if &own[..end] == name.as_bytes() {
            return contents(header);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &[u8] = include_bytes!("../tests/fatbin/none.bin");
    const FAST: &[u8] = include_bytes!("../tests/fatbin/speed.bin");
    const USUAL: &[u8] = include_bytes!("../tests/fatbin/default.bin");

    /// The same PTX behind an entry of machine code, which is skipped.
    fn behind_code() -> Vec<u8> {
        let entries = &NONE[32..];
        let mut whole = NONE[16..24].to_vec();
        whole.extend((entries.len() as u64 + 64 + 8).to_le_bytes());
        let mut code = entries[..ENTRY].to_vec();
        code[0] = 2;
        code[4..16].copy_from_slice(&[64, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        whole.extend(code);
        whole.extend([0xab; 8]);
        whole.extend(entries);
        whole
    }

    #[test]
    fn the_text_is_the_same_however_it_is_compressed() {
        let plain = ptx(NONE).unwrap();
        assert_eq!((plain.len(), plain[0].target), (1, 75));
        assert!(plain[0].text.contains(".visible .entry saxpy("));
        for compressed in [FAST, USUAL, &behind_code()] {
            let found = ptx(compressed).unwrap();
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].text.trim(), plain[0].text.trim());
            let program = crate::Program::parse(&found[0].text).unwrap();
            let names: Vec<_> = program.kernels().iter().map(|kernel| kernel.name.as_str()).collect();
            assert!(names.contains(&"saxpy") && names.contains(&"scale"));
        }
    }

    #[test]
    fn whatever_is_cut_or_changed_is_refused_or_read() {
        for whole in [NONE, FAST, USUAL, &behind_code()] {
            for length in 0..whole.len() - 8 {
                assert!(ptx(&whole[..length]).is_err(), "{length}");
            }
            for at in 0..whole.len() {
                let mut changed = whole.to_vec();
                changed[at] ^= 0xff;
                let _ = ptx(&changed);
            }
        }
    }

    #[test]
    fn what_cannot_be_read_says_what_to_do() {
        let mut other = FAST.to_vec();
        // The flags of the entry of the second container.
        other[16 + 16 + 41] = 0x10;
        assert_eq!(ptx(&other), Err(FatbinError::Compression(0x1011)));
        assert!(ptx(&other).unwrap_err().to_string().contains("--no-compress"));
        let mut long = FAST.to_vec();
        long[16 + 16 + 56..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(ptx(&long), Err(FatbinError::Large(u64::MAX, MAX_TEXT as u64)));
        // A container of machine code only.
        let mut code = FAST.to_vec();
        code[32] = 2;
        assert_eq!(ptx(&code), Err(FatbinError::NoPtx));
        assert_eq!(ptx(&[1; 64]), Err(FatbinError::Magic(0x0101_0101)));
    }

    #[test]
    fn a_wrapper_says_where_its_container_is() {
        let mut wrapper = Vec::new();
        wrapper.extend(WRAPPER_MAGIC.to_le_bytes());
        wrapper.extend(1u32.to_le_bytes());
        wrapper.extend(0x1234_5678u64.to_le_bytes());
        wrapper.extend([0; 8]);
        assert_eq!(wrapper.len(), WRAPPER);
        assert_eq!(wrapped(&wrapper), Ok(0x1234_5678));
        wrapper[4] = 9;
        assert_eq!(wrapped(&wrapper), Err(FatbinError::Version(9)));
        assert_eq!(container_size(&NONE[16..]), Ok(NONE.len() as u64 - 16));
    }

    #[test]
    fn a_section_is_found_in_an_elf_file() {
        let mut elf = vec![0; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let names = b"\0.nv_fatbin\0.names\0";
        elf[0x28..0x30].copy_from_slice(&64u64.to_le_bytes());
        elf[0x3a..0x40].copy_from_slice(&[64, 0, 2, 0, 1, 0]);
        for (name, start, size) in [(1u32, 192 + names.len(), NONE.len()), (12, 192, names.len())] {
            let mut header = vec![0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(start as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            elf.extend(header);
        }
        elf.extend(names);
        elf.extend(NONE);
        assert_eq!(section(&elf), Ok(NONE));
        for at in 0..192 {
            let mut changed = elf.clone();
            changed[at] ^= 0xff;
            let _ = section(&changed);
        }
        assert!(section(&elf[..100]).is_err());
    }
}
