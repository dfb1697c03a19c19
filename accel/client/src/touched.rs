//! What a record is about, beside what it says: objects whose order counts, and data in the arena. Knows no call.

use accel_proto::{Span, opencl as calls};

use crate::object::Object;

/// Objects that a record mentions, and data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Touched<'a> {
    objects: &'a [&'a Object],
    lists: &'a [&'a [&'a Object]],
    /// The one whose last record it is.
    pub(crate) released: Option<&'a Object>,
    /// What of the arena the record is about: what the server reads, and what it writes before its answer.
    pub(crate) reads: Option<Span>,
    pub(crate) writes: Option<Span>,
}

impl<'a> Touched<'a> {
    pub(crate) fn new(objects: &'a [&'a Object], lists: &'a [&'a [&'a Object]]) -> Self {
        Self {
            objects,
            lists,
            ..Self::default()
        }
    }

    /// The server reads data that was put into the arena for it.
    pub(crate) fn reads(self, span: Option<Span>) -> Self {
        Self { reads: span, ..self }
    }

    /// The server has written data into the arena when it answers; only of a call that is waited for.
    pub(crate) fn writes(self, span: Option<Span>) -> Self {
        Self { writes: span, ..self }
    }

    /// The last record about an object.
    pub(crate) fn release(object: &'a Object) -> Self {
        Self {
            released: Some(object),
            ..Self::default()
        }
    }

    /// Whether what a command is about is of its queue's context (OpenCL API: `CL_INVALID_CONTEXT` otherwise).
    pub(crate) fn is_of_one_context(&self) -> bool {
        let queue = self.objects.first().filter(|object| object.is::<calls::CommandQueue>());
        let Some(context) = queue.and_then(|queue| queue.parent::<calls::Context>()) else {
            return true;
        };
        let is_there = |object: &Object| {
            object
                .parent::<calls::Context>()
                .is_none_or(|its| std::ptr::eq(its, context))
        };
        self.all().all(is_there)
    }

    /// All objects.
    pub(crate) fn all(&self) -> impl Iterator<Item = &'a Object> {
        let listed = self.lists.iter().copied().flatten();
        self.objects.iter().chain(listed).copied().chain(self.released)
    }
}
