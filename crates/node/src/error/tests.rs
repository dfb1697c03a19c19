//! What an error is called, where that is not plain.

use super::*;

#[test]
fn a_directory_that_cannot_be_shared_is_the_askers_choice() {
    let share = |step| host::Error::Share {
        step,
        path: PathBuf::from("/somewhere"),
        why: "it is on another disk".to_owned(),
    };
    let error = Error::from(share("mapping the owners"));
    assert_eq!((error.reason(), error.for_api().kind), ("volume", ErrorKind::Invalid));
}
