//! What PyTorch's libraries ask of CUDA's, by readelf(1), and which of it our libraries do not serve: a table in the tree, which must not
//! grow unnoticed with another version of the wheel, nor name what is served since.
//!
//! Knows names alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use accel_spec::cuda::{Body, Cuda};
use anyhow::{Context as _, Result, bail};

use crate::context::Context;

/// The table, from the checkout's root.
const TABLE: &str = "accel/clients/torch/imports-not-served.txt";
const HEAD: &str = "# What PyTorch's wheel (wheel/requirements.txt) asks of CUDA's libraries and is answered with the library's code: version of the symbol, name.\n\
                    # `cargo xtask torch --write-imports` writes it.\n";
/// What names of functions begin with whose libraries give them no version.
const WITHOUT_VERSION: &[&str] = &["nccl", "cusparseLt", "cuFile", "nvshmem"];

/// Compares the wheel with the table, or writes that; how many imports are not served.
pub(crate) fn check(context: &Context, wheel: &Path, write: bool) -> Result<usize> {
    let cuda = accel_spec::cuda::cuda(&context.root)?;
    let mut found = BTreeSet::new();
    let libraries = wheel.join("torch/lib");
    for entry in fs::read_dir(&libraries).with_context(|| format!("cannot read {}", libraries.display()))? {
        let path = entry?.path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().contains(".so"))
        {
            let mut readelf = Command::new("readelf");
            // Not into the step's log: these are a hundred thousand lines.
            let output = readelf.args(["--dyn-syms", "--wide"]).arg(&path).output();
            let output = output.context("cannot run readelf, which Debian has in binutils")?;
            if !output.status.success() {
                bail!(
                    "readelf does not read {}: {}",
                    path.display(),
                    String::from_utf8_lossy(&output.stderr).trim()
                );
            }
            found.extend(String::from_utf8_lossy(&output.stdout).lines().filter_map(import));
        }
    }
    let lines = not_served(&cuda, &found)?;
    let path = context.root.join(TABLE);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    if write {
        fs::write(&path, format!("{HEAD}{text}"))?;
        return Ok(lines.len());
    }
    let table = fs::read_to_string(&path).with_context(|| format!("cannot read {TABLE}"))?;
    compare(&table, &lines)?;
    Ok(lines.len())
}

/// A function that a line of readelf's says is looked for elsewhere, if it is of CUDA's: its version and its name.
fn import(line: &str) -> Option<(String, String)> {
    let words: Vec<_> = line.split_whitespace().collect();
    let [_, _, _, "FUNC" | "NOTYPE", _, _, "UND", name, ..] = words.as_slice() else {
        return None;
    };
    match name.split_once('@') {
        Some((name, version))
            if version.starts_with("libcu") || version.starts_with("libnv") || version == "NVSHMEM" =>
        {
            Some((version.trim_start_matches('@').to_owned(), name.to_owned()))
        }
        Some(_) => None,
        None => {
            let of_driver = name
                .strip_prefix("cu")
                .is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_uppercase()));
            let is_one = of_driver || WITHOUT_VERSION.iter().any(|prefix| name.starts_with(prefix));
            is_one.then(|| ("-".to_owned(), (*name).to_owned()))
        }
    }
}

/// The lines of the table; refuses what our libraries do not have at all.
fn not_served(cuda: &Cuda, found: &BTreeSet<(String, String)>) -> Result<Vec<String>> {
    let mut functions = BTreeMap::new();
    for library in &cuda.libraries {
        for function in &library.functions {
            functions.insert(function.name.as_str(), (&library.versions, &function.body));
        }
    }
    let mut lines = Vec::new();
    let mut missing = Vec::new();
    for (version, name) in found {
        match functions.get(name.as_str()) {
            Some((versions, body)) if version == "-" || versions.contains(version) => {
                if matches!(body, Body::NotServed(_)) {
                    lines.push(format!("{version} {name}"));
                }
            }
            _ => missing.push(format!("{name}@{version}")),
        }
    }
    if !missing.is_empty() {
        bail!(
            "PyTorch asks for functions that accel/spec/cuda does not have; add them there, under [not_served] at least: {}",
            missing.join(", ")
        );
    }
    Ok(lines)
}

fn compare(table: &str, lines: &[String]) -> Result<()> {
    let known: BTreeSet<&str> = table.lines().filter(|line| !line.starts_with('#')).collect();
    let found: BTreeSet<&str> = lines.iter().map(String::as_str).collect();
    let shown = |lines: Vec<&&str>| lines.into_iter().copied().collect::<Vec<_>>().join(", ");
    let grown: Vec<_> = found.difference(&known).collect();
    if !grown.is_empty() {
        bail!(
            "{TABLE} lacks what the wheel asks for and is not served: {}; serve it, or write the table anew",
            shown(grown)
        );
    }
    let gone: Vec<_> = known.difference(&found).collect();
    if !gone.is_empty() {
        bail!(
            "{TABLE} names what is served or not asked for: {}; write it anew",
            shown(gone)
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_cuda_are_found_and_others_are_not() {
        let line = |name: &str| format!("    12: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND {name} (3)");
        let of = |version: &str, name: &str| Some((version.to_owned(), name.to_owned()));
        assert_eq!(
            import(&line("cudaMalloc@libcudart.so.13")),
            of("libcudart.so.13", "cudaMalloc")
        );
        assert_eq!(import(&line("cuLaunchKernel")), of("-", "cuLaunchKernel"));
        assert_eq!(import(&line("ncclSend")), of("-", "ncclSend"));
        for other in ["malloc@GLIBC_2.2.5", "custom_function", "_ZN3c104cudaEv"] {
            assert_eq!(import(&line(other)), None, "{other}");
        }
        assert_eq!(import(&line("cudaMalloc@libcudart.so.13").replace("UND", "12")), None);
    }

    #[test]
    fn a_table_that_is_not_what_is_found_is_refused() {
        let lines = ["- a".to_owned(), "- b".to_owned()];
        compare("# words\n- a\n- b\n", &lines).unwrap();
        let error = |table| compare(table, &lines).unwrap_err().to_string();
        assert!(error("- a\n").contains("lacks what the wheel asks for and is not served: - b;"));
        assert!(error("- a\n- b\n- c\n").contains("names what is served or not asked for: - c;"));
    }

    #[test]
    fn the_tables_names_are_those_that_the_specification_does_not_serve() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let cuda = accel_spec::cuda::cuda(&root).unwrap();
        let table = fs::read_to_string(root.join(TABLE)).unwrap();
        let lines: Vec<_> = table
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(str::to_owned)
            .collect();
        assert!(lines.len() > 100);
        let found = lines.iter().map(|line| line.split_once(' ').unwrap());
        let found = found
            .map(|(version, name)| (version.to_owned(), name.to_owned()))
            .collect();
        compare(&table, &not_served(&cuda, &found).unwrap()).unwrap();
        let other = BTreeSet::from([("libcudart.so.13".to_owned(), "cudaNever".to_owned())]);
        let error = not_served(&cuda, &other).unwrap_err().to_string();
        assert!(error.contains("cudaNever@libcudart.so.13"), "{error}");
    }
}
