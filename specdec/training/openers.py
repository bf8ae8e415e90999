"""How a share of the self-written questions begins, so that every kind of request occurs.

Left to itself a small chat model asks for advice and plans most of the time. The first words of
the user turn are given for a share of the conversations and the target writes the rest. All of
these were written for this project.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Opener:
    """First words of user turns of one category, and the most tokens the target adds to them."""

    category: str
    weight: float
    max_new: int
    texts: tuple[str, ...]


_PASSAGE_TOKENS = 320

# fmt: off
OPENERS = (
    Opener(
        "writing",
        3,
        120,
        (
            "Write a short story about",
            "Write an email to",
            "Compose a poem that",
            "Draft a speech",
            "Write a product description for",
            "Help me write a cover letter for",
            "Write a blog post",
            "Give me three slogans for",
            "Rewrite this paragraph in a friendlier tone:",
            "Describe a scene in which",
        ),
    ),
    Opener(
        "roleplay",
        2,
        120,
        (
            "Pretend you are",
            "Act as a",
            "You are now a",
            "Imagine that you are",
            "Let's play a game. You are",
            "Speak to me as if you were",
            "Suppose you were",
        ),
    ),
    Opener(
        "reasoning",
        2,
        120,
        (
            "Which word does not belong",
            "If all",
            "There are three",
            "Is it possible that",
            "Which is heavier,",
            "Arrange these events in order:",
            "My friend claims that",
            "What is the flaw in this argument?",
            "A farmer has",
        ),
    ),
    Opener(
        "math",
        4,
        120,
        (
            "A shop sells",
            "Maria has",
            "A train leaves",
            "Tom buys",
            "The price of",
            "A rectangle has",
            "Each week, Ben",
            "There are 24",
            "How many",
            "If x",
            "Solve the equation",
            "A class of 30",
            "Anna earns",
            "A recipe needs",
            "What is the probability that",
            "At a bakery,",
            "David is twice as old as",
            "A car travels",
            "Compute",
            "In a garden there are",
        ),
    ),
    Opener(
        "coding",
        3,
        160,
        (
            "Write a Python function that",
            "Write a JavaScript function",
            "How do I use a SQL query to",
            "Fix the bug in this code:\n\n",
            "Explain what this code does:\n\n",
            "Write a C program that",
            "What is the difference between a list and",
            "Implement an algorithm that",
            "Write a bash script to",
            "Write unit tests for",
        ),
    ),
    Opener(
        "extraction",
        2,
        200,
        (
            "Extract all the names and dates from this text:\n\n",
            "List the facts in this text:\n\n",
            "Turn the following notes into a table:\n\n",
            "Give the answer as JSON. Find the people in:",
            "Find the main claim in this review:\n\n",
            "Which of these sentences are positive?\n",
        ),
    ),
    Opener(
        "stem",
        3,
        80,
        (
            "Explain how",
            "Why does",
            "What happens when",
            "Describe the process of",
            "How does a",
            "What is the role of",
            "What are the causes of",
            "In physics, what",
            "How do plants",
            "What is the chemical",
            "How would an engineer",
        ),
    ),
    Opener(
        "humanities",
        3,
        80,
        (
            "What were the main causes of",
            "How did the",
            "Discuss the importance of",
            "Compare the",
            "What did philosophers think about",
            "Explain the difference between",
            "Summarise the history",
            "What are the arguments for and against",
            "How has the economy of",
            "Who was",
        ),
    ),
    Opener(
        "translation",
        8,
        80,
        (
            "Translate this German sentence into English: Die",
            "Translate into English: Der",
            "Translate this German sentence into English: Es",
            "Please translate to English: Das",
            "What does this German sentence mean in English? Ich",
            "German to English, please: In",
            "Put this into English: Wir",
            "Translate the sentence from German: Nach",
            "Translate this German text: Ein",
            "How do you say this in English: Er",
            "Translate from French to English: Le",
            "Translate this Spanish sentence to English: El",
            "Translate this from German to English:",
            "Give the English translation of this German sentence:",
            "Translate German into English: Mit",
            "From German to English: Auch",
            "In English, please: Sie",
            "Translate the German news headline to English:",
            "Translate into English: Im",
            "Please translate from German to English: Bei",
            "Translate this sentence to English: Nicht",
            "What is this in English? Zu",
        ),
    ),
    Opener(
        "summarization",
        4,
        _PASSAGE_TOKENS,
        (
            "Summarize this article:\n\n",
            "Give a summary of the following news story:\n\n(Reuters) -",
            "Write a short summary of this text.\n\nPolice",
            "Sum up the following report: The",
            "Condense this article into three sentences:\n\nA",
            "What is this text about?\n\n",
            "Write the main points of this news report:\n\nLONDON -",
            "TL;DR this:\n\n",
        ),
    ),
    Opener(
        "qa",
        5,
        40,
        (
            "Who",
            "When",
            "Where",
            "What",
            "Which",
            "How many",
            "In which year",
            "who was the first",
            "what is the name of",
            "when did the",
            "where is the",
            "who wrote",
            "what does",
            "who sings",
            "how long",
            "what year",
            "who won the",
            "what kind of",
            "name the",
        ),
    ),
    Opener(
        "rag",
        4,
        _PASSAGE_TOKENS,
        (
            "Use the passages to answer the question.\n\nPassage 1:",
            "Context: The",
            "Answer from the text below only.\n\nText:",
            "Read this and answer the question at the end.\n\n",
            "Here is some background information.\n\n",
            "Document:\n\n",
            "According to this text:\n\nIn",
        ),
    ),
)
