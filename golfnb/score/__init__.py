"The score: sliding windows, and models that adapt to what they have scored."
