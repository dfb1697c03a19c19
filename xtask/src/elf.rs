//! What a shared library asks of the system that loads it: other libraries, and versions of their symbols (System V ABI, dynamic linking;
//! LSB Core, symbol versioning). Knows no library in particular.

use anyhow::{Context as _, Result, bail};
use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn as _, FileHeader as _};

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Libraries, by their names.
    pub(crate) libraries: Vec<String>,
    /// A library, and a version of symbols that it must have.
    pub(crate) versions: Vec<(String, String)>,
}

/// Reads it of a library's bytes.
pub(crate) fn needs(bytes: &[u8]) -> Result<Needs> {
    let header = FileHeader64::<Endianness>::parse(bytes).context("this is no ELF file of 64 bits")?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).context("a name in it is no text");
    let mut found = Needs {
        libraries: Vec::new(),
        versions: Vec::new(),
    };
    if let Some((entries, link)) = sections.dynamic(endian, bytes)? {
        let strings = sections.strings(endian, bytes, link)?;
        for entry in entries.iter().filter(|entry| entry.tag32(endian) == Some(DT_NEEDED)) {
            found.libraries.push(text(entry.string(endian, strings)?)?);
        }
    }
    if let Some((mut files, link)) = sections.gnu_verneed(endian, bytes)? {
        let strings = sections.strings(endian, bytes, link)?;
        while let Some((file, mut versions)) = files.next()? {
            let library = text(file.file(endian, strings)?)?;
            while let Some(version) = versions.next()? {
                found
                    .versions
                    .push((library.clone(), text(version.name(endian, strings)?)?));
            }
        }
    }
    Ok(found)
}

/// Refuses what needs a newer glibc than `floor`, the two numbers of its version.
pub(crate) fn no_newer_than(floor: [u32; 2], needs: &Needs) -> Result<()> {
    for (library, version) in &needs.versions {
        let Some(numbers) = version.strip_prefix("GLIBC_") else {
            continue;
        };
        let mut numbers = numbers.split('.').map(str::parse::<u32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
            bail!("{library} is to have {version}, which is no version with a number");
        };
        if [major, minor] > floor {
            let [major, minor] = floor;
            bail!("it needs {version} of {library}, and is to load where glibc is {major}.{minor}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// This test program itself needs a glibc that is not that old, wherever it is built.
    #[test]
    fn a_newer_version_is_found_and_named() {
        let own = needs(&fs::read("/proc/self/exe").unwrap()).unwrap();
        assert!(own.libraries.iter().any(|library| library == "libc.so.6"), "{own:?}");
        let error = no_newer_than([2, 2], &own).unwrap_err().to_string();
        assert!(error.contains("GLIBC_2.") && error.contains("glibc is 2.2"), "{error}");
        no_newer_than([3, 0], &own).unwrap();
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        let needs = |version: &str| Needs {
            libraries: Vec::new(),
            versions: vec![("libc.so.6".into(), version.into())],
        };
        for old in ["GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.9", "GCC_4.2.0"] {
            no_newer_than([2, 17], &needs(old)).unwrap();
        }
        for new in ["GLIBC_2.18", "GLIBC_2.34", "GLIBC_3.0", "GLIBC_PRIVATE"] {
            assert!(no_newer_than([2, 17], &needs(new)).is_err(), "{new}");
        }
    }

    #[test]
    fn what_is_no_library_is_refused() {
        assert!(needs(b"#!/bin/sh\n").is_err() && needs(&[]).is_err());
    }
}
