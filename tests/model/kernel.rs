// SPDX-License-Identifier: GPL-2.0

//! The parts of the kernel crate that the checked files use, made of loom's types.

pub mod sync {
    pub mod atomic {
        use loom::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering as Any};

        /// The kernel's orderings.
        pub mod ordering {
            use super::Any;

            pub trait Ordering {
                const ANY: Any;
            }

            macro_rules! ordering {
                ($($name:ident = $any:ident,)*) => {
                    $(
                        pub struct $name;
                        impl Ordering for $name {
                            const ANY: Any = Any::$any;
                        }
                    )*
                };
            }

            ordering! {
                Relaxed = Relaxed,
                Acquire = Acquire,
                Release = Release,
                Full = SeqCst,
            }
        }

        pub use ordering::{Acquire, Full, Relaxed, Release};

        use ordering::Ordering;

        /// A number that loom has an atomic for.
        pub trait Number: Copy {
            type Loom;
            fn new(value: Self) -> Self::Loom;
            fn load(this: &Self::Loom, order: Any) -> Self;
            fn store(this: &Self::Loom, value: Self, order: Any);
            fn swap(this: &Self::Loom, value: Self, order: Any) -> Self;
            fn exchange(this: &Self::Loom, old: Self, new: Self, order: Any) -> Result<Self, Self>;
            fn fetch_add(this: &Self::Loom, value: Self, order: Any) -> Self;
            fn fetch_sub(this: &Self::Loom, value: Self, order: Any) -> Self;
            fn get(this: &mut Self::Loom) -> Self;
            fn set(this: &mut Self::Loom, value: Self);
        }

        macro_rules! number {
            ($($number:ty: $loom:ty,)*) => {
                $(
                    impl Number for $number {
                        type Loom = $loom;
                        fn new(value: Self) -> $loom {
                            <$loom>::new(value)
                        }
                        fn load(this: &$loom, order: Any) -> Self {
                            this.load(order)
                        }
                        fn store(this: &$loom, value: Self, order: Any) {
                            this.store(value, order)
                        }
                        fn swap(this: &$loom, value: Self, order: Any) -> Self {
                            this.swap(value, order)
                        }
                        fn exchange(
                            this: &$loom,
                            old: Self,
                            new: Self,
                            order: Any,
                        ) -> Result<Self, Self> {
                            // As in the kernel, one that fails orders nothing.
                            this.compare_exchange(old, new, order, Any::Relaxed)
                        }
                        fn fetch_add(this: &$loom, value: Self, order: Any) -> Self {
                            this.fetch_add(value, order)
                        }
                        fn fetch_sub(this: &$loom, value: Self, order: Any) -> Self {
                            this.fetch_sub(value, order)
                        }
                        fn get(this: &mut $loom) -> Self {
                            this.with_mut(|number| *number)
                        }
                        fn set(this: &mut $loom, value: Self) {
                            this.with_mut(|number| *number = value)
                        }
                    }
                )*
            };
        }

        number! {
            i32: AtomicI32,
            i64: AtomicI64,
            u32: AtomicU32,
            u64: AtomicU64,
        }

        /// The value of an atomic that is not shared; loom has to be told what is written.
        pub struct Exclusive<'a, T: Number> {
            atomic: &'a mut T::Loom,
            value: T,
        }

        impl<T: Number> core::ops::Deref for Exclusive<'_, T> {
            type Target = T;

            fn deref(&self) -> &T {
                &self.value
            }
        }

        impl<T: Number> core::ops::DerefMut for Exclusive<'_, T> {
            fn deref_mut(&mut self) -> &mut T {
                &mut self.value
            }
        }

        impl<T: Number> Drop for Exclusive<'_, T> {
            fn drop(&mut self) {
                T::set(self.atomic, self.value);
            }
        }

        /// As `kernel::sync::atomic::Atomic`.
        pub struct Atomic<T: Number>(T::Loom);

        impl<T: Number> Atomic<T> {
            pub fn new(value: T) -> Self {
                Self(T::new(value))
            }

            pub fn get_mut(&mut self) -> Exclusive<'_, T> {
                let value = T::get(&mut self.0);
                Exclusive {
                    atomic: &mut self.0,
                    value,
                }
            }

            pub fn load<O: Ordering>(&self, _: O) -> T {
                T::load(&self.0, O::ANY)
            }

            pub fn store<O: Ordering>(&self, value: T, _: O) {
                T::store(&self.0, value, O::ANY)
            }

            pub fn xchg<O: Ordering>(&self, value: T, _: O) -> T {
                T::swap(&self.0, value, O::ANY)
            }

            pub fn cmpxchg<O: Ordering>(&self, old: T, new: T, _: O) -> Result<T, T> {
                T::exchange(&self.0, old, new, O::ANY)
            }

            pub fn add<O: Ordering>(&self, value: T, _: O) {
                T::fetch_add(&self.0, value, O::ANY);
            }

            pub fn fetch_add<O: Ordering>(&self, value: T, _: O) -> T {
                T::fetch_add(&self.0, value, O::ANY)
            }

            pub fn fetch_sub<O: Ordering>(&self, value: T, _: O) -> T {
                T::fetch_sub(&self.0, value, O::ANY)
            }
        }
    }
}
