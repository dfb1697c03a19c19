//! The client's library of forwarded accelerators, twice: for images with glibc, from 2.17 on, and for images with musl.
//!
//! The linker is given libraries that have the symbols of `accel/client/glibc.toml` and nothing else, so that it cannot choose newer ones
//! than the list has; what came out is looked at once more. Does not know what the library does.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::build::{cargo, publish};
use crate::context::{Context, MUSL};
use crate::elf::{self, Needs};
use crate::runner::{Finished, Task};

/// The oldest glibc that an image may have: that of manylinux2014, and of the distributions which that was made for.
const FLOOR: [u32; 2] = [2, 17];
/// Its symbols, and what it has not, from the checkout's root.
const SYMBOLS: &str = "accel/client/glibc.toml";
const MISSING: &str = "accel/client/glibc.c";
/// What the library is called when it is built, and for musl when it is installed.
pub(super) const LIBRARY: &str = "libbasalt_opencl.so";
pub(super) const MUSL_LIBRARY: &str = "libbasalt_opencl-musl.so";
/// Libraries that rustc names for glibc; what they have is in libc.so, or named by it.
const PARTS: [&str; 5] = ["util", "rt", "pthread", "m", "dl"];

/// What loads the libraries, where its server is, and how both are run.
const LOADS: &str = "accel/client/tests/loads/main.c";
const SOCKET: &str = "socket";
const WITH_SERVER: &str = r#"
    "$1" --socket "$BASALT_ACCEL_SOCKET" --backend null & server=$!
    while [ ! -S "$BASALT_ACCEL_SOCKET" ] && kill -0 $server; do sleep 0.05; done
    "$2" "$3"; code=$?
    kill $server; rm -f "$BASALT_ACCEL_SOCKET"
    exit $code"#;

const LIMIT: Duration = Duration::from_secs(40 * 60);
const LOADING: Duration = Duration::from_secs(60);

/// File, version, symbols.
pub(super) type Symbols = BTreeMap<String, BTreeMap<String, Vec<String>>>;

/// The library for glibc; it stays in the build directory, where it is returned.
pub(crate) fn for_glibc(context: &Context, task: &mut Task) -> Result<(PathBuf, Finished)> {
    let directory = context.target().join("glibc");
    let symbols = link_libraries(context, task, &directory)?;
    let mut command = driver(context);
    command.args(["--", "-C"]);
    command.arg(format!("link-arg=-L{}", directory.display()));
    // A symbol that the list does not have is an error here, and not only where the library is loaded.
    command.args(["-C", "link-arg=-Wl,-z,defs"]);
    let finished = task.run_within(&mut command, LIMIT)?;
    let built = context.target().join("library").join(LIBRARY);
    checked(&built, |needs| old_enough(&symbols, needs))?;
    Ok((built, finished))
}

/// The library for musl. Of gcc's run-time library, which such an image may not have, Rust brings what it needs.
pub(crate) fn for_musl(context: &Context, task: &mut Task) -> Result<(PathBuf, Finished)> {
    let directory = context.target().join("musl-unwind");
    fs::create_dir_all(&directory)?;
    let unwind = of_target(MUSL)?.join("self-contained/libunwind.a");
    if !unwind.exists() {
        bail!("{} is not there; run: rustup target add {MUSL}", unwind.display());
    }
    publish(&unwind, &directory.join("libgcc_s.a"))?;
    let mut command = driver(context);
    // Programs for that target are static unless they are told otherwise; a library that is to be loaded cannot be.
    for (key, value) in [
        ("rustflags", r#"["-C", "target-feature=-crt-static"]"#),
        ("linker", r#""musl-gcc""#),
    ] {
        command.args(["--config", &format!("target.{MUSL}.{key}={value}")]);
    }
    command.args(["--target", MUSL, "--", "-C"]);
    command.arg(format!("link-arg=-L{}", directory.display()));
    command.args(["-C", "link-arg=-Wl,-z,defs"]);
    let finished = task.run_within(&mut command, LIMIT)?;
    let built = context.target().join(MUSL).join("library").join(LIBRARY);
    checked(&built, |needs| match (&*needs.libraries, &*needs.versions) {
        ([libc], []) if libc == "libc.so" => Ok(()),
        _ => bail!("it needs {needs:?}, and is to need musl's libc.so alone"),
    })?;
    Ok((built, finished))
}

/// Where Rust has its libraries for a target.
fn of_target(target: &str) -> Result<PathBuf> {
    let mut rustc = Command::new("rustc");
    let told = rustc.args(["--print", "target-libdir", "--target", target]).output();
    let told = told.context("cannot run rustc")?;
    if !told.status.success() {
        let reason = String::from_utf8_lossy(&told.stderr);
        bail!(
            "rustc does not say where its libraries for {target} are ({}): {}; if it is not installed, run: rustup target add {target}",
            told.status,
            reason.trim()
        );
    }
    Ok(String::from_utf8(told.stdout)?.trim().into())
}

/// Has a program of each C library load its library and call it, with a server behind it that does nothing.
pub(crate) fn loads(context: &Context, task: &mut Task, server: &Path, libraries: [(&str, &Path); 2]) -> Result<()> {
    let directory = context.target().join("loads");
    fs::create_dir_all(&directory)?;
    for (compiler, library) in libraries {
        let program = directory.join(compiler);
        let mut compile = Command::new(compiler);
        compile
            .args(["-O1", "-Wall", "-Werror", "-pthread", "-o"])
            .arg(&program);
        task.run_within(compile.arg(context.root.join(LOADS)).arg("-ldl"), LIMIT)?;
        let mut run = Command::new("sh");
        run.args(["-c", WITH_SERVER, "sh"]).args([server, &program, library]);
        // Of a path from here, because a socket's is short.
        run.current_dir(&directory).env("BASALT_ACCEL_SOCKET", SOCKET);
        run.env("BASALT_ACCEL_DEBUG", "1");
        let failed = || {
            format!(
                "a program of {compiler} cannot use {}; its words are in the step's log",
                library.display()
            )
        };
        task.run_within(&mut run, LOADING).with_context(failed)?;
    }
    Ok(())
}

/// Cargo's command up to what the target changes.
fn driver(context: &Context) -> Command {
    let mut command = cargo(
        context,
        &["rustc", "--profile", "library", "-p", "basalt-accel-client", "--lib"],
    );
    if context.ci {
        command.arg("--locked");
    }
    command
}

/// Refuses what needs a library that the list does not have, or a newer version of one.
pub(super) fn old_enough(symbols: &Symbols, needs: &Needs) -> Result<()> {
    listed(symbols, needs)?;
    elf::no_newer_than(FLOOR, needs)
}

pub(super) fn checked(built: &Path, check: impl FnOnce(&Needs) -> Result<()>) -> Result<()> {
    let said = || format!("{} would not load in every image", built.display());
    let bytes = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    elf::needs(&bytes).and_then(|needs| check(&needs)).with_context(said)
}

/// Refuses what needs a library that the list does not have.
fn listed(symbols: &Symbols, needs: &Needs) -> Result<()> {
    let mut libraries = needs.libraries.iter();
    match libraries.find(|library| !symbols.contains_key(*library)) {
        Some(other) => bail!("it needs {other}, which is not in {SYMBOLS}"),
        None => Ok(()),
    }
}

/// Makes what the linker reads in place of glibc: libraries without code, which have the list's symbols. The list is returned.
pub(super) fn link_libraries(context: &Context, task: &mut Task, directory: &Path) -> Result<Symbols> {
    fs::create_dir_all(directory)?;
    let list = context.root.join(SYMBOLS);
    let symbols: Symbols =
        toml::from_str(&fs::read_to_string(&list)?).with_context(|| format!("{SYMBOLS} is no list"))?;
    for (library, versions) in &symbols {
        let (code, map) = sources(versions);
        let [code_path, map_path] = ["s", "map"].map(|end| directory.join(format!("{library}.{end}")));
        fs::write(&code_path, code)?;
        fs::write(&map_path, map)?;
        let mut command = Command::new("cc");
        command
            .args(["-shared", "-nostdlib", "-o"])
            .arg(directory.join(library));
        command.arg(format!("-Wl,-h,{library},--version-script={}", map_path.display()));
        task.run_within(command.arg(code_path), LIMIT)?;
    }
    let (object, archive) = (directory.join("missing.o"), directory.join("libmissing.a"));
    let mut command = Command::new("cc");
    command
        .args(["-O2", "-fPIC", "-Wall", "-Werror", "-c", "-o"])
        .arg(&object);
    task.run_within(command.arg(context.root.join(MISSING)), LIMIT)?;
    task.run_within(Command::new("ar").arg("rcsD").arg(&archive).arg(&object), LIMIT)?;
    for (name, text) in scripts(&symbols, directory) {
        fs::write(directory.join(name), text)?;
    }
    Ok(symbols)
}

/// Assembler's and linker's words for a library with these symbols.
fn sources(versions: &BTreeMap<String, Vec<String>>) -> (String, String) {
    let (mut code, mut map) = (String::from(".text\n"), String::new());
    for (version, symbols) in versions {
        let _ = writeln!(map, "{version} {{ global: {}; }};", symbols.join("; "));
        for symbol in symbols {
            let _ = writeln!(code, ".globl {symbol}\n.type {symbol}, @function\n{symbol}: .byte 0");
        }
    }
    (code, map)
}

/// What the linker finds by `-lc` and by the other names: scripts of its own language, which name the libraries.
fn scripts(symbols: &Symbols, directory: &Path) -> Vec<(String, String)> {
    let path = |library: &str| directory.join(library).display().to_string();
    let (gcc, libc): (Vec<_>, Vec<_>) = symbols.keys().partition(|library| library.starts_with("libgcc"));
    let libc: Vec<_> = libc.into_iter().map(|library| path(library)).collect();
    let gcc: Vec<_> = gcc.into_iter().map(|library| path(library)).collect();
    let archive = path("libmissing.a");
    let mut scripts = vec![
        (
            "libc.so".to_owned(),
            format!("GROUP ( {archive} AS_NEEDED ( {} ) )\n", libc.join(" ")),
        ),
        ("libgcc_s.so".to_owned(), format!("GROUP ( {} )\n", gcc.join(" "))),
    ];
    scripts.extend(PARTS.map(|part| (format!("lib{part}.so"), "/* in libc.so */\n".to_owned())));
    scripts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_rustc_does_not_know_is_an_error_with_its_words() {
        let error = of_target("x86_64-of-nobody").unwrap_err().to_string();
        assert!(
            error.contains("x86_64-of-nobody") && error.contains("rustup target add"),
            "{error}"
        );
        assert!(error.contains("exit status"), "{error}");
    }

    #[test]
    fn the_list_has_no_newer_version_than_the_floor() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let list: Symbols = toml::from_str(&fs::read_to_string(root.join(SYMBOLS)).unwrap()).unwrap();
        let versions = list
            .iter()
            .flat_map(|(library, versions)| versions.keys().map(|version| (library.clone(), version.clone())));
        let needs = Needs {
            libraries: list.keys().cloned().collect(),
            versions: versions.collect(),
        };
        assert!(needs.versions.len() > 5);
        elf::no_newer_than(FLOOR, &needs).unwrap();
        listed(&list, &needs).unwrap();
        let other = Needs {
            libraries: vec!["libc.so.6".to_owned(), "libm.so.6".to_owned()],
            versions: Vec::new(),
        };
        let error = listed(&list, &other).unwrap_err().to_string();
        assert!(error.contains("libm.so.6"), "{error}");
        let mut symbols: Vec<_> = list.values().flat_map(BTreeMap::values).flatten().collect();
        let all = symbols.len();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(all, symbols.len(), "a symbol twice");
    }
}
