//! The KVM back end of the engine traits.
