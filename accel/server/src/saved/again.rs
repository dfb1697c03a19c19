//! For tests: a second client with the objects of a first one, by what is saved of that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Instant;

use super::devices::Devices;
use super::state::{TRAILER, Writing};
use super::whole::Image;
use super::{Output, Refusal, restore, save};
use crate::session::Client;

struct ToFile<'f>(&'f File);

impl Output for ToFile<'_> {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }
}

/// Makes the second one what the first one is, which it is made like. The outer refusal is of saving, the inner one of restoring.
pub(crate) fn again(first: &Client, second: Client) -> Result<Result<Client, Refusal>, Refusal> {
    let kept = tempfile::tempfile()?;
    let mut output = ToFile(&kept);
    let mut file = Writing::new(&mut output, 0);
    let devices = Devices::of(&first.backend).map_err(Refusal::code)?;
    save::drain(first, Instant::now())?;
    let objects = save::objects(first, &devices, &mut file)?;
    // Its end is not looked at here, but there has to be one.
    let length = usize::try_from(TRAILER).unwrap_or_default();
    file.append(&vec![0; length])?;
    let image = Arc::new(Image::new(&kept)?);
    let second = second.saved(first.turns.len(), Some(Arc::clone(&image)));
    Ok(match restore::objects(&second, &objects, &devices, &image) {
        Ok(()) => Ok(second),
        Err(refusal) => {
            second.end();
            Err(refusal)
        }
    })
}
