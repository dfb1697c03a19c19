//! A shared library (ELF, x86-64) with nothing in it but names: Debian's fio wants hundreds of functions of storage clusters at
//! its start, from libraries that are larger than a guest, and calls none of them here. Knows no fio.

use anyhow::{Context, Result, ensure};

const EHDR: usize = 64;
const PHDR: usize = 56;
const SHDR: usize = 64;
const SYM: usize = 24;

/// The names that a program wants from libraries and that begin with one of `prefixes`.
pub(super) fn wanted(program: &[u8], prefixes: &[&str]) -> Result<Vec<String>> {
    ensure!(program.starts_with(b"\x7fELF\x02\x01"), "no 64-bit ELF file");
    let number = |at: usize, length: usize| -> Result<usize> {
        let bytes = program.get(at..at + length).context("an ELF file that is cut short")?;
        let value = bytes
            .iter()
            .rev()
            .fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        Ok(usize::try_from(value)?)
    };
    let (sections, count) = (number(0x28, 8)?, number(0x3c, 2)?);
    let section = |index: usize| -> Result<(usize, usize, usize)> {
        let at = sections + index * SHDR;
        Ok((number(at + 0x18, 8)?, number(at + 0x20, 8)?, number(at + 0x28, 4)?))
    };
    let mut names = Vec::new();
    for index in 0..count {
        // SHT_DYNSYM
        if number(sections + index * SHDR + 4, 4)? != 11 {
            continue;
        }
        let (symbols, length, link) = section(index)?;
        let (strings, _, _) = section(link)?;
        for symbol in (symbols..symbols + length).step_by(SYM) {
            let defined = number(symbol + 6, 2)? != 0;
            let start = strings + number(symbol, 4)?;
            let text = program.get(start..).context("a name outside of the file")?;
            let name = String::from_utf8_lossy(text.split(|byte| *byte == 0).next().unwrap_or_default());
            if !defined && prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                names.push(name.into_owned());
            }
        }
    }
    Ok(names)
}

/// The library.
pub(super) fn library(names: &[String]) -> Vec<u8> {
    let mut strings = vec![0];
    // The first symbol is none; the others are global functions in some section, at some address.
    let mut symbols = vec![0; SYM];
    for name in names {
        symbols.extend(u32_of(strings.len()));
        symbols.extend([0x12, 0, 1, 0]);
        symbols.extend(u64_of(EHDR));
        symbols.extend(u64_of(0));
        strings.extend(name.as_bytes());
        strings.push(0);
    }
    // One bucket; each symbol leads to the next.
    let last = names.len();
    let mut hash: Vec<u8> = [1, last + 1, last.min(1), 0].into_iter().flat_map(u32_of).collect();
    hash.extend((1..=last).flat_map(|index| u32_of(if index == last { 0 } else { index + 1 })));
    hash.resize(hash.len().next_multiple_of(8), 0);

    let dynamic = EHDR + 3 * PHDR;
    let hash_at = dynamic + 6 * 16;
    let symbols_at = hash_at + hash.len();
    let strings_at = symbols_at + symbols.len();
    let end = strings_at + strings.len();
    // DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_NULL
    let entries = [
        (4, hash_at),
        (5, strings_at),
        (6, symbols_at),
        (10, strings.len()),
        (11, SYM),
        (0, 0),
    ];
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // ET_DYN, EM_X86_64, version; no entry, program headers behind this one, no sections.
    file.extend([3, 0, 62, 0, 1, 0, 0, 0]);
    file.extend([0, EHDR, 0].into_iter().flat_map(u64_of));
    file.extend(u32_of(0));
    for half in [EHDR, PHDR, 3, SHDR, 0, 0] {
        file.extend(u16::try_from(half).unwrap_or(u16::MAX).to_le_bytes());
    }
    // PT_LOAD, PT_DYNAMIC, PT_GNU_STACK: readable and writable, as the loader writes to the second.
    for (kind, start, length, align) in [(1, 0, end, 0x1000), (2, dynamic, 6 * 16, 8), (0x6474_e551, 0, 0, 16)] {
        file.extend(u32_of(kind));
        file.extend(u32_of(6));
        file.extend(
            [start, start, start, length, length, align]
                .into_iter()
                .flat_map(u64_of),
        );
    }
    file.extend(
        entries
            .into_iter()
            .flat_map(|(tag, value)| [u64_of(tag), u64_of(value)].concat()),
    );
    file.extend([hash, symbols, strings].concat());
    file
}

fn u32_of(value: usize) -> [u8; 4] {
    u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes()
}

fn u64_of(value: usize) -> [u8; 8] {
    (value as u64).to_le_bytes()
}
