//! A directory of libraries that programs of this machine find before all others, if there is one: those of a forwarded accelerator. Programs
//! are told of it by their environment. Knows no library.

use std::sync::OnceLock;

static DIRECTORY: OnceLock<String> = OnceLock::new();

/// Programs that are started from now on find the libraries there. The first directory stays.
pub(crate) fn are_in(directory: &str) {
    // An agent prepares its machine once.
    _ = DIRECTORY.set(directory.to_owned());
}

/// Has a program's environment name the directory, before those that it names.
pub(crate) fn tell(environment: &mut Vec<Vec<u8>>) {
    if let Some(directory) = DIRECTORY.get() {
        put_first(environment, directory);
    }
}

fn put_first(environment: &mut Vec<Vec<u8>>, directory: &str) {
    /// Where the dynamic linker looks first (ld.so(8)).
    const NAME: &[u8] = b"LD_LIBRARY_PATH=";
    let mut first = NAME.to_vec();
    first.extend(directory.as_bytes());
    match environment.iter_mut().find(|entry| entry.starts_with(NAME)) {
        None => environment.push(first),
        Some(entry) => {
            let others = entry.get(NAME.len()..).unwrap_or_default();
            // An empty one among them would be the working directory.
            if !others.is_empty() {
                first.push(b':');
                first.extend(others);
            }
            *entry = first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_before_those_of_the_program() {
        for (before, after) in [
            (&["A=b"][..], &["A=b", "LD_LIBRARY_PATH=/run/x"][..]),
            (&["LD_LIBRARY_PATH=", "A=b"], &["LD_LIBRARY_PATH=/run/x", "A=b"]),
            (&["LD_LIBRARY_PATH=/a:/b"], &["LD_LIBRARY_PATH=/run/x:/a:/b"]),
        ] {
            let mut environment: Vec<_> = before.iter().map(|entry| entry.as_bytes().to_vec()).collect();
            put_first(&mut environment, "/run/x");
            assert_eq!(
                environment,
                after.iter().map(|entry| entry.as_bytes().to_vec()).collect::<Vec<_>>()
            );
        }
    }
}
