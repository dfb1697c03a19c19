//! What the first clone of a snapshot or a template teaches those that come after it. Its write set: pages that it has written by the
//! time it is one of its own. All clones write nearly the same ones, so a VMM is told to copy them before its guest runs, which costs
//! less than copying each when the guest writes to it. Its page order: in which order its guest asked for pages, where they come on
//! demand. Both are a help and no more: whoever finds none, or a wrong one, clones as well.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::{fs, process};

use node_api::Paging;
use observe::span::span;
use vmm_api::{ClientError, MAX_ORDER, MAX_WRITE_SET, PageRuns, VmmClient};

use crate::Error;
use crate::saved::snapshots::Place;

/// The most pages of an order: 256 MiB.
const MAX_ORDER_PAGES: u64 = 65536;

/// What a VMM is asked for.
pub(crate) type Question = fn(&mut VmmClient) -> Result<PageRuns, ClientError>;

/// One thing to be learned.
struct Lesson {
    path: PathBuf,
    question: Question,
    most_pages: u64,
}

impl Lesson {
    /// What a VMM does with memory that gets to its guest in this way.
    fn of(place: &Place, paging: Paging) -> Self {
        match paging {
            Paging::Mapped | Paging::Eager => Self {
                path: place.write_set(),
                question: VmmClient::write_set,
                most_pages: MAX_WRITE_SET,
            },
            Paging::OnDemand => Self {
                path: place.page_order(),
                question: VmmClient::page_order,
                most_pages: MAX_ORDER_PAGES,
            },
        }
    }
}

/// The pages that a VMM is to prepare for a guest whose memory comes in this way; none where nobody knows.
pub(crate) fn pages(place: &Place, paging: Paging) -> PageRuns {
    read(&Lesson::of(place, paging).path)
}

fn read(path: &Path) -> PageRuns {
    let read = || -> io::Result<PageRuns> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
    read().unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            log::warn!("{} is of no use: {error}", path.display());
        }
        PageRuns::new()
    })
}

/// Saves what the first clone has done until now, as its VMM says, which `ask` asks. One whose memory came eagerly
/// tells nothing: an old kernel has all of it look changed.
pub(crate) fn save_first(place: &Place, paging: Paging, ask: impl FnOnce(Question) -> Result<PageRuns, Error>) {
    let Lesson {
        path,
        question,
        most_pages,
    } = Lesson::of(place, paging);
    if path.exists() || paging == Paging::Eager {
        return;
    }
    let _span = span("prefetch list");
    let save = || -> Result<(), Box<dyn std::error::Error>> {
        let runs = cut(ask(question)?, most_pages);
        if runs.is_empty() {
            return Err("it cannot be told what pages it has needed".into());
        }
        // Two first ones do not write to one file.
        let beside = path.with_extension(format!("{}-{:?}", process::id(), std::thread::current().id()));
        let written = serde_json::to_vec(&runs)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&beside, text))
            .and_then(|()| fs::rename(&beside, &path));
        if written.is_err() {
            // What there is of it takes room on a full disk.
            drop(fs::remove_file(&beside));
        }
        Ok(written?)
    };
    if let Err(error) = save() {
        log::info!("clones get their pages one by one: {error}");
    }
}

/// A guest may have taken its VMM over, and others must not pay for that without limit: what is behind so many pages is left out.
fn cut(mut runs: PageRuns, most: u64) -> PageRuns {
    let mut left = most;
    let fitting = runs.iter().take(MAX_ORDER).take_while(|(_, pages)| {
        let fits = *pages > 0 && *pages <= left;
        left = left.saturating_sub(*pages);
        fits
    });
    runs.truncate(fitting.count());
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_that_is_missing_or_damaged_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path(), "a");
        fs::create_dir(place.directory()).unwrap();
        assert_eq!(pages(&place, Paging::Mapped), []);
        fs::write(place.write_set(), "[[1,2],[7,1]]").unwrap();
        assert_eq!(pages(&place, Paging::Mapped), [(1, 2), (7, 1)]);
        assert_eq!(pages(&place, Paging::Eager), [(1, 2), (7, 1)]);
        assert_eq!(pages(&place, Paging::OnDemand), []);
        for damaged in ["", "[[1,2],", "[[1]]", "{}"] {
            fs::write(place.write_set(), damaged).unwrap();
            assert_eq!(pages(&place, Paging::Mapped), [], "{damaged}");
        }
    }

    #[test]
    fn the_first_clone_alone_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path(), "a");
        fs::create_dir(place.directory()).unwrap();
        let answered = |paging, answer: Result<PageRuns, Error>| {
            let mut asked = false;
            save_first(&place, paging, |_| {
                asked = true;
                answer
            });
            asked
        };
        assert!(!answered(Paging::Eager, Ok(vec![(1, 2)])));
        assert!(answered(Paging::Mapped, Err(Error::Cancelled)));
        assert!(
            answered(Paging::Mapped, Ok(Vec::new())),
            "the one before has said nothing"
        );
        assert!(answered(Paging::Mapped, Ok(vec![(1, 2)])));
        assert!(!answered(Paging::Mapped, Ok(vec![(3, 4)])));
        assert_eq!(pages(&place, Paging::Mapped), [(1, 2)]);
        assert!(answered(Paging::OnDemand, Ok(vec![(5, 6)])));
        assert_eq!(pages(&place, Paging::OnDemand), [(5, 6)]);
    }

    #[test]
    fn no_vmm_makes_others_prepare_all_of_their_memory() {
        let runs = vec![(0, 99), (1 << 40, 1)];
        assert_eq!(cut(runs.clone(), 100), runs);
        assert_eq!(cut(runs, 99), [(0, 99)]);
        assert_eq!(cut(vec![(7, u64::MAX), (0, u64::MAX)], u64::MAX), [(7, u64::MAX)]);
        assert_eq!(cut(vec![(1, 1), (0, 0), (2, 1)], 100), [(1, 1)]);
        assert_eq!(cut(vec![(1, 1); MAX_ORDER + 1], u64::MAX).len(), MAX_ORDER);
    }
}
