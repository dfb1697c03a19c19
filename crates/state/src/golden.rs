//! The kit for golden files: each version of each schema keeps one sample, `golden/KIND-vVERSION.json` in its crate, that
//! must be readable for ever. For tests only, hence it panics where a test has gone wrong.
//!
//! To add one, run the test with `BASALT_WRITE_GOLDEN=1` and then `cargo xtask tidy --accept-golden`; a file that is there
//! is never written again.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

use crate::schema::Schema;

fn path(root: &str, kind: &str, version: u32) -> PathBuf {
    Path::new(root).join("golden").join(format!("{kind}-v{version}.json"))
}

/// Checks that `value` is what the sample of the current version says, and that it is still written the same way. `root`
/// is the crate's `CARGO_MANIFEST_DIR`.
///
/// # Panics
/// It is not, or there is no sample.
#[track_caller]
pub fn check<T: Schema + PartialEq + Debug>(root: &str, value: &T) {
    let path = path(root, T::KIND, T::VERSION);
    let written = serde_json::to_value(value).expect("a value with a form in JSON");
    if std::env::var_os("BASALT_WRITE_GOLDEN").is_some() && !path.exists() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("the golden folder");
        let text = serde_json::to_string_pretty(&written).expect("JSON");
        fs::write(&path, text + "\n").expect("the golden file");
    }
    assert_eq!(&load::<T>(root, T::VERSION), value, "{}", path.display());
    let text = fs::read_to_string(&path).expect("the golden file");
    let golden: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        golden,
        written,
        "{}: it is written otherwise now; raise the version",
        path.display()
    );
}

/// The sample of `version`, as the current type reads it.
///
/// # Panics
/// There is none, or it cannot be read any more.
#[track_caller]
pub fn load<T: Schema>(root: &str, version: u32) -> T {
    let path = path(root, T::KIND, version);
    let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    T::load(version, &text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
