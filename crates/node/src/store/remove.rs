//! Directories go with all that is in them.

use std::fs;
use std::io;
use std::path::Path;

use crate::Error;

/// How often a directory is emptied in which others make files.
const ATTEMPTS: u32 = 10;

/// Removes a directory with all that is in it; it is fine if there is none. Who makes a file in it meanwhile, as the checksums of a
/// snapshot are made in the background, finds it gone next.
pub(crate) fn remove_directory(path: &Path) -> Result<(), Error> {
    for attempt in 1.. {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && attempt < ATTEMPTS => (),
            removed => return removed.map_err(Error::file("remove", path)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_in_which_somebody_makes_files() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("a");
        remove_directory(&path).unwrap();
        for round in 0..50 {
            fs::create_dir(&path).unwrap();
            for number in 0..20 {
                fs::write(path.join(number.to_string()), "x").unwrap();
            }
            let theirs = path.clone();
            let maker = std::thread::spawn(move || {
                let made = (0..5).take_while(|number| fs::write(theirs.join(format!("new-{number}")), "x").is_ok());
                made.count()
            });
            remove_directory(&path).unwrap();
            maker.join().unwrap();
            assert!(!path.exists(), "in round {round}");
        }
    }
}
