//! Which C library the programs of an image are for: the one of a driver has to be the same.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Dynamic loaders, by the names that programs have of them.
const GLIBC: &str = "lib64/ld-linux-x86-64.so.2";
const MUSL: &str = "lib/ld-musl-x86_64.so.1";

/// A program that nearly every image has.
const SHELL: &str = "bin/sh";

/// How far a program's file is looked into for its loader's name, which linkers put right behind the headers.
const LOOK: u64 = 4096;

/// A C library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CLibrary {
    /// GNU's.
    Glibc,
    /// Alpine's, for one.
    Musl,
}

/// That of the image whose root this is. One may have both loaders: a stand-in for glibc's on Alpine (gcompat), or musl's for
/// programs that somebody builds. There the shell's counts.
pub(super) fn of(root: &Path) -> CLibrary {
    let has = |loader| root.join(loader).exists();
    match (has(GLIBC), has(MUSL)) {
        (_, false) => CLibrary::Glibc,
        (false, true) => CLibrary::Musl,
        (true, true) => match names(&root.join(SHELL), MUSL) {
            true => CLibrary::Musl,
            false => CLibrary::Glibc,
        },
    }
}

/// Whether a program names a loader. One that cannot be read names none.
fn names(program: &Path, loader: &str) -> bool {
    let mut start = Vec::new();
    let read = File::open(program).and_then(|file| file.take(LOOK).read_to_end(&mut start));
    let name = format!("/{loader}\0").into_bytes();
    read.is_ok() && start.windows(name.len()).any(|bytes| bytes == name)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// An image with these loaders, whose shell names the last argument.
    fn image(loaders: &[&str], shell: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        loaders.iter().for_each(|loader| put(loader, b"\x7fELF"));
        if let Some(loader) = shell {
            put(SHELL, format!("\x7fELF and headers\0/{loader}\0 and code").as_bytes());
        }
        root
    }

    #[test]
    fn the_loader_decides_and_the_shell_where_there_are_two() {
        for (loaders, shell, expected) in [
            (&[GLIBC][..], Some(GLIBC), CLibrary::Glibc),
            (&[MUSL], Some(MUSL), CLibrary::Musl),
            (&[MUSL], None, CLibrary::Musl),
            (&[GLIBC, MUSL], Some(MUSL), CLibrary::Musl),
            (&[GLIBC, MUSL], Some(GLIBC), CLibrary::Glibc),
            (&[GLIBC, MUSL], None, CLibrary::Glibc),
            (&[], None, CLibrary::Glibc),
        ] {
            let root = image(loaders, shell);
            assert_eq!(of(root.path()), expected, "{loaders:?}, {shell:?}");
        }
    }
}
